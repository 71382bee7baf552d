"""What a mesh of devices needs: how the operations split over it, and how states travel along a sequence axis."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel._sizes import known
from ejkernel.kernels._delta import DeltaProblem
from ejkernel.kernels._implementation import Implementation
from ejkernel.kernels._linear import LinearProblem
from ejkernel.kernels._linear.checks import offsets
from ejkernel.kernels._linear.config import TILE_FIELDS
from ejkernel.parallel.delta import DeltaShard
from ejkernel.parallel.exchange import Shards, axis_size
from ejkernel.parallel.linear import LinearShard
from ejkernel.parallel.sequence import Family, solve_split, with_state

__all__ = ["local_offsets", "over_sequence_axis"]


def local_offsets(axis: str, cu_seqlens: Any, tokens: int) -> jax.Array:
    """Offsets of packed sequences counted in the shard's own tokens; sequences that lie in other shards are empty."""
    axis_size(axis)
    low = lax.axis_index(axis) * tokens
    return jnp.clip(jnp.asarray(offsets(cu_seqlens), jnp.int32) - low, 0, tokens)


def over_sequence_axis(
    problem: LinearProblem | DeltaProblem, implementation: Implementation[Any, Any], cfg: Any, axis: str, cu_seqlens: Any
) -> tuple[jax.Array, jax.Array]:
    """(output of the shard's own tokens, final state of the whole sequences) where time is split over a mesh axis.

    Args:
        problem: the shard's own call.
        implementation: what computes it, with `cfg`.
        cu_seqlens: the offsets in the whole row.
    """
    shards = Shards.of(axis, problem.reverse, cfg.exchange)
    if not all(known(*x.shape) for x in jax.tree.leaves(problem)):
        raise ValueError("sequence_axis needs sizes that are known; some of this call's are symbolic.")
    call = with_state(problem.normalised() if isinstance(problem, DeltaProblem) else problem)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), call)
    family: Family
    if isinstance(shapes, DeltaProblem):
        no_tiles = dataclasses.replace(cfg, **dict.fromkeys(TILE_FIELDS))
        wide = lambda p: no_tiles if p.value.shape != shapes.value.shape else cfg
        family = DeltaShard(call, lambda p: implementation.solve(p, wide(p)), lambda p: implementation.supports(p) is None)
    else:
        family = LinearShard(shapes, lambda p: implementation.solve(p, cfg))
    whole = None if cu_seqlens is None else jnp.asarray(offsets(cu_seqlens), jnp.int32)
    output, final = solve_split(call, call.differentiable, whole, shards, family)
    return problem.finish(output), final
