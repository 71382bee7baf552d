"""Gated linear attention as its definition says it: float64, one token at a time. The judge of every implementation."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def linear_reference(
    query: Any,
    key: Any,
    value: Any,
    g: Any = None,
    g_gamma: Any = None,
    gk: Any = None,
    gv: Any = None,
    initial_state: Any = None,
    cu_seqlens: Any = None,
    *,
    softmax_scale: float | None = None,
    reverse: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """`(output, final state)` of the recurrence, differentiable; call it where 64-bit numbers are enabled.

    h_t = D_t(h_{t-1}) + k_t^T v_t, o_t = softmax_scale * q_t h_t. `cu_seqlens` must be concrete.

    Example:
        >>> with jax.enable_x64(True):
        ...     q = jnp.ones((1, 3, 1, 1), jnp.float64)
        ...     output, state = linear_reference(q, q, q)
        >>> output.ravel().tolist(), state.shape
        ([1.0, 2.0, 3.0], (1, 1, 1, 1))
    """
    if cu_seqlens is not None:
        return _packed(
            (query, key, value, g, gk, gv), g_gamma, initial_state, cu_seqlens, softmax_scale=softmax_scale, reverse=reverse
        )
    wide: Callable[[Any], Any] = lambda x: None if x is None else jnp.asarray(x, jnp.float64)
    q, k, v, g, g_gamma, gk, gv, S = map(wide, (query, key, value, g, g_gamma, gk, gv, initial_state))
    B, _, H, K = q.shape
    per_head = lambda x: None if x is None else jnp.repeat(x, H // x.shape[2], axis=2)
    k, v, g, gk, gv = map(per_head, (k, v, g, gk, gv))
    scale = K**-0.5 if softmax_scale is None else softmax_scale
    S = jnp.zeros((B, H, K, v.shape[-1])) if S is None else S.reshape(B, H, K, v.shape[-1])
    if g_gamma is not None:
        g_gamma = jnp.broadcast_to(g_gamma, (B, H))[..., None, None]

    def step(S: jax.Array, row: Any) -> tuple[jax.Array, jax.Array]:
        q, k, v, g, gk, gv = row
        if g is not None:
            S = S * jnp.exp(g if g.ndim == 3 else g[..., None])[..., None]
        if g_gamma is not None:
            S = S * jnp.exp(g_gamma)
        if gk is not None:
            S = S * jnp.exp(gk)[..., None]
        if gv is not None:
            S = S * jnp.exp(gv)[..., None, :]
        S = S + k[..., None] * v[..., None, :]
        return S, scale * jnp.einsum("bhk,bhkv->bhv", q, S)

    rows = tuple(None if x is None else jnp.moveaxis(x, 1, 0) for x in (q, k, v, g, gk, gv))
    S, output = lax.scan(step, S, rows, reverse=reverse)
    return jnp.moveaxis(output, 0, 1), S


def _packed(per_token: tuple, g_gamma: Any, initial_state: Any, cu_seqlens: Any, **options: Any) -> tuple[jax.Array, jax.Array]:
    """Each sequence by itself."""
    rank3 = jnp.ndim(per_token[0]) == 3
    per_token = tuple(x if x is None or not rank3 else x[None] for x in per_token)
    offsets = np.asarray(cu_seqlens)
    N, H = len(offsets) - 1, per_token[0].shape[2]
    g_gamma = None if g_gamma is None else jnp.broadcast_to(g_gamma, (N, H))
    outputs, states = [], []
    for n, (start, end) in enumerate(itertools.pairwise(offsets)):
        part: Callable[[Any], Any] = lambda x, rows=slice(start, end): None if x is None else x[:, rows]
        q, k, v, g, gk, gv = map(part, per_token)
        gamma = None if g_gamma is None else g_gamma[n]
        state = None if initial_state is None else jnp.reshape(initial_state, (N, H, q.shape[-1], v.shape[-1]))[n]
        output, final = linear_reference(q, k, v, g, gamma, gk, gv, state, **options)
        outputs.append(output)
        states.append(final)
    output = jnp.concatenate(outputs, 1)
    return output[0] if rank3 else output, jnp.concatenate(states)
