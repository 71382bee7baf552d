"""The three linear operations as every platform offers them: their arguments, in the order of the documents, as one problem.

A platform brings one implementation of `LinearProblem` and registers all three with it (`register`).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel._numbers import as_int
from ejkernel.kernels._implementation import Implementation, PlatformFunction, Signature
from ejkernel.kernels._linear.config import LinearConfig
from ejkernel.kernels._linear.problem import LinearProblem, state_dtype
from ejkernel.kernels._registry import Backend, Platform, kernel_registry


def recurrent(
    query, key, value, g=None, g_gamma=None, gk=None, gv=None, softmax_scale=None, initial_state=None, reverse=False,
    cu_seqlens=None,
) -> LinearProblem:  # fmt: skip
    """The recurrence with any combination of gates."""
    return LinearProblem.from_arguments(
        query, key, value, g=g, g_gamma=g_gamma, gk=gk, gv=gv, initial_state=initial_state, cu_seqlens=cu_seqlens,
        softmax_scale=softmax_scale, reverse=reverse,
    )  # fmt: skip


def gla(
    query, key, value, g=None, g_gamma=None, softmax_scale=None, initial_state=None, reverse=False, cu_seqlens=None
) -> LinearProblem:  # fmt: skip
    """Gated linear attention: one gate `g`, per head or per key channel, and a constant decay per head."""
    return recurrent(
        query, key, value, g, g_gamma, softmax_scale=softmax_scale, initial_state=initial_state, reverse=reverse,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip


def lightning(
    query, key, value, layer_idx, num_layers, softmax_scale=None, initial_state=None, reverse=False, cu_seqlens=None
) -> LinearProblem:  # fmt: skip
    """A constant decay per head that the layer's depth sets."""
    heads = jnp.shape(query)[-2] if jnp.ndim(query) > 1 else 0
    decay = lightning_decay(heads, layer_idx, num_layers, state_dtype(query))
    return recurrent(
        query, key, value, g_gamma=decay, softmax_scale=softmax_scale, initial_state=initial_state, reverse=reverse,
        cu_seqlens=cu_seqlens,
    )  # fmt: skip


def lightning_decay(heads: int, layer_idx: int, num_layers: int, dtype: np.dtype | type = np.float32) -> jax.Array:
    """`g_gamma [H]` of a layer: -(8 / H * (1 - layer_idx / num_layers)) * arange(H).

    Example:
        >>> lightning_decay(4, 0, 12).tolist()
        [-0.0, -2.0, -4.0, -6.0]
    """
    layer_idx, num_layers = as_int("layer_idx", layer_idx), as_int("num_layers", num_layers)
    if num_layers < 1:
        raise ValueError(f"num_layers must be at least 1; got {num_layers}.")
    if not 0 <= layer_idx < num_layers:
        raise ValueError(f"layer_idx must be from 0 to num_layers - 1 = {num_layers - 1}; got {layer_idx}.")
    return -(8 / max(heads, 1) * (1 - layer_idx / num_layers)) * jnp.arange(heads, dtype=dtype)


def _finish(problem: LinearProblem, results: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    output, final_state = results
    return problem.finish(output), final_state


RECURRENT = Signature("recurrent", recurrent, LinearConfig, _finish, "RecurrentAttentionConfig")
GLA = Signature("gla", gla, LinearConfig, _finish, "GLAttentionConfig")
LIGHTNING = Signature("lightning_attn", lightning, LinearConfig, _finish, "LightningAttentionConfig")


def register(
    implementation: Implementation[LinearProblem, LinearConfig], platform: Platform, backend: Backend, priority: int = 0
) -> tuple[PlatformFunction, PlatformFunction, PlatformFunction]:
    """`(recurrent, recurrent_gla, lightning_attn)` of a platform, registered."""
    recurrent, recurrent_gla, lightning_attn = (
        signature.register(implementation, kernel_registry, platform, backend, priority)
        for signature in (RECURRENT, GLA, LIGHTNING)
    )
    return recurrent, recurrent_gla, lightning_attn
