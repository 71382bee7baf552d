"""Causality and windows over positions, as packed rows have them.

The kernel compares indices. Positions that count the tokens of each segment, as those of packed rows do, keep the same keys as
indices would, since only tokens of one segment meet. Whether they do is data, so the program asks, and where they do not it
computes as `xla` does.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from ejkernel.kernels._attention import AttentionProblem
from ejkernel.kernels._pallas.attention._plan import Plan
from ejkernel.kernels._pallas.attention._solve import splash_output
from ejkernel.kernels._xla.attention._interface import XlaAttention


def attended(problem: AttentionProblem, plan: Plan) -> Float[Array, "B T H V"]:
    """The output in the compute dtype."""
    by_index = lambda problem: splash_output(dataclasses.replace(problem, q_positions=None, kv_positions=None), plan)
    if problem.q_positions is None or 0 in (*problem.query.shape, problem.kv_len, problem.value_dim):
        return by_index(problem)
    xla = XlaAttention()
    otherwise = lambda problem: xla.solve(problem, xla.heuristic(problem))[0]
    return lax.cond(keeps_the_same(problem), by_index, otherwise, problem)


def keeps_the_same(problem: AttentionProblem) -> Bool[Array, ""]:
    """Whether the bounds keep the same keys by position as by index, among the pairs that segments keep."""
    q, k = problem.q_positions, problem.kv_positions
    assert q is not None
    assert k is not None
    index = lambda axis: lax.broadcasted_iota(jnp.int32, (1, problem.q_len, problem.kv_len), axis)

    def kept(distance: Int[Array, "b T S"]) -> Bool[Array, "b T S"]:
        keep = jnp.ones(distance.shape, bool)
        keep = keep if problem.left is None else keep & (distance >= -problem.left)
        return keep if problem.right is None else keep & (distance <= problem.right)

    same = kept(k[:, None, :] - q[:, :, None]) == kept(index(2) - index(1))  # [b, T, S], which XLA sums up without storing it
    if problem.q_segment_ids is not None and problem.kv_segment_ids is not None:
        ids = problem.q_segment_ids[:, :, None]
        same |= (ids != problem.kv_segment_ids[:, None, :]) | (ids < 0)
    return jnp.all(same)
