"""A linear operation on one platform, as users of that platform call it and as the executor does.

The argument lists of the three operations stand here, once; a platform brings `solve`, `supports` and its choice of configs.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel._numbers import as_array, as_int
from ejkernel.kernels._linear.config import LinearConfig
from ejkernel.kernels._linear.problem import LinearProblem

Solve = Callable[[LinearProblem, LinearConfig], tuple[jax.Array, jax.Array]]


def recurrent_problem(
    query, key, value, g=None, g_gamma=None, gk=None, gv=None, initial_state=None, cu_seqlens=None, *,
    softmax_scale=None, reverse=False,
) -> LinearProblem:  # fmt: skip
    """The recurrence with any combination of gates."""
    return LinearProblem.from_arguments(
        query, key, value, g=g, g_gamma=g_gamma, gk=gk, gv=gv, initial_state=initial_state, cu_seqlens=cu_seqlens,
        softmax_scale=softmax_scale, reverse=reverse,
    )  # fmt: skip


def gla_problem(
    query, key, value, g=None, g_gamma=None, initial_state=None, cu_seqlens=None, *, softmax_scale=None, reverse=False
) -> LinearProblem:  # fmt: skip
    """Gated linear attention: one gate `g`, per head or per key channel, and a constant decay per head."""
    return recurrent_problem(
        query, key, value, g, g_gamma, None, None, initial_state, cu_seqlens, softmax_scale=softmax_scale, reverse=reverse
    )  # fmt: skip


def lightning_problem(
    query, key, value, initial_state=None, cu_seqlens=None, *, layer_idx, num_layers, softmax_scale=None, reverse=False
) -> LinearProblem:  # fmt: skip
    """A constant decay per head that the layer's depth sets."""
    query = as_array("query", query)
    heads = query.shape[-2] if query.ndim > 1 else 0
    return recurrent_problem(
        query, key, value, None, lightning_decay(heads, layer_idx, num_layers), None, None, initial_state, cu_seqlens,
        softmax_scale=softmax_scale, reverse=reverse,
    )  # fmt: skip


def lightning_decay(heads: int, layer_idx: int, num_layers: int) -> jax.Array:
    """`g_gamma [H]` of a layer: -(8 / H * (1 - layer_idx / num_layers)) * arange(H).

    Example:
        >>> lightning_decay(4, 0, 12).tolist()
        [-0.0, -2.0, -4.0, -6.0]
    """
    layer_idx, num_layers = as_int("layer_idx", layer_idx), as_int("num_layers", num_layers)
    if num_layers < 1 or not 0 <= layer_idx < num_layers:
        raise ValueError(f"layer_idx must be from 0 to num_layers - 1 = {num_layers - 1}; got {layer_idx}.")
    return -(8 / max(heads, 1) * (1 - layer_idx / num_layers)) * jnp.arange(heads, dtype=jnp.float32)


@dataclasses.dataclass(frozen=True)
class LinearFunction:
    """A platform's implementation of one linear operation: call it with the operation's arguments, or `solve` a problem.

    Called, it returns `(output, final_state)`: `[B, T, H, V]` in query's dtype and `[N, H, K, V]` in float32. `cfg=None`
    takes the platform's heuristic.
    """

    problem_of: Callable[..., LinearProblem]
    platform_solve: Solve
    heuristic: Callable[[LinearProblem], LinearConfig]
    candidates: Callable[[LinearProblem], Sequence[LinearConfig]]
    supports: Callable[[LinearProblem], str | None] = lambda problem: None

    def __call__(self, *args: Any, cfg: LinearConfig | None = None, **kwargs: Any) -> tuple[jax.Array, jax.Array]:
        problem = self.problem_of(*args, **kwargs)
        if (reason := self.supports(problem)) is not None:
            raise ValueError(f"this platform cannot take the call: {reason}.")
        return self.solve(problem, self.heuristic(problem) if cfg is None else cfg)

    def solve(self, problem: LinearProblem, cfg: LinearConfig) -> tuple[jax.Array, jax.Array]:
        if not isinstance(cfg, LinearConfig):
            raise TypeError(f"cfg must be a LinearConfig (such as RecurrentAttentionConfig) or None; got {type(cfg).__name__}.")
        output, final_state = self.platform_solve(problem, cfg)
        return problem.finish(output), final_state

    @property
    def __signature__(self) -> inspect.Signature:
        operation = inspect.signature(self.problem_of)
        cfg = inspect.Parameter("cfg", inspect.Parameter.KEYWORD_ONLY, default=None)
        return operation.replace(parameters=[*operation.parameters.values(), cfg], return_annotation=tuple)
