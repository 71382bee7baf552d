"""Which configurations the tuner measures for a call, and which ones the kernels refuse.

Candidates differ from the heuristic in one or two fields each and fit an A100's and an H100's shared memory (those of the
benchmark's shapes were compiled for both, those of the per-key gate are in the tests). What a field does depends on the gates:

    block_q      tokens per chunk, in every kernel
    block_k      key channels per tile: the walk of the states, the gradient; not where the whole state is one tile (which with
                 gates per key and value channel it may be in the forward alone)
    block_d      value channels per tile: every kernel that walks states or writes outputs or a value side's gradient
    num_warps    every kernel but those that prepare a walk, and the sides of gates per key channel in bfloat16
    num_stages   loads in flight: every loop over chunks, and over channels of a scalar gradient

With 129 to 256 key channels, any of block_d, num_warps and num_stages takes `_key.outputs` with them instead of `_wide`, whose
tiles are fixed.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from ejkernel.kernels._linear import LinearConfig, LinearProblem
from ejkernel.kernels._triton.recurrent._heuristics import MAX_STEPS, heuristic

ROWS = (16, 32, 64, 128)  # legal block_q
MOST = 12  # candidates of a call, the heuristic included

_BY_HEAD: list[dict[str, Any]] = [
    {"block_d": 32}, {"num_warps": 8}, {"num_warps": 8, "block_d": 32}, {"num_stages": 2}, {"num_stages": 2, "block_d": 32},
    {"block_q": 32}, {"block_q": 32, "block_d": 32},
]  # fmt: skip
_BY_HEAD_WIDE: list[dict[str, Any]] = [  # longer chunks leave fewer states, wider tiles read q and k less often
    {"block_q": 128, "num_warps": 8}, {"num_warps": 8, "block_d": 128},
]  # fmt: skip
_PER_KEY: list[dict[str, Any]] = [
    {"block_d": 32}, {"num_warps": 8}, {"num_warps": 8, "block_d": 32}, {"num_stages": 2}, {"num_stages": 2, "block_d": 32},
]  # fmt: skip
_PER_VALUE: list[dict[str, Any]] = [
    {"block_d": 32}, {"block_k": 32}, {"block_k": 32, "block_d": 32}, {"num_warps": 8}, {"block_q": 32},
    {"block_q": 32, "num_warps": 8},
]  # fmt: skip
_PER_KEY_AND_VALUE: list[dict[str, Any]] = [  # in bfloat16, where chunks of 64 rows have kernels of their own
    {"block_d": 32}, {"block_d": 64}, {"block_k": 32}, {"block_k": 32, "block_d": 32}, {"num_stages": 1},
    {"num_stages": 1, "block_d": 64},
]  # fmt: skip
_STEPS: list[dict[str, Any]] = [
    {"block_d": 16}, {"block_d": 32}, {"block_d": 64}, {"num_warps": 2}, {"num_warps": 8}, {"block_d": 16, "num_warps": 1},
    {"block_d": 16, "num_warps": 2}, {"block_d": 64, "num_warps": 8},
]  # fmt: skip


def candidates(problem: LinearProblem) -> list[LinearConfig]:
    """The heuristic first, then at most `MOST` - 1 others; none that `refusal` refuses or whose tiles exceed the channels."""
    first = heuristic(problem)
    _, T, _, K, V = problem.shape
    steps = T <= MAX_STEPS
    if steps:
        changes = _STEPS
    elif problem.gv is not None:
        changes = _PER_KEY_AND_VALUE if problem.gk is not None and _all_bfloat16(problem) else _PER_VALUE
    elif problem.gk is not None:
        changes = _PER_KEY
    else:
        changes = [*_BY_HEAD, *(_BY_HEAD_WIDE if K > 128 else [])]
    sizes = {"block_k": K, "block_d": V}
    fits = lambda change: all(change.get(name, 16) <= max(16, 1 << (size - 1).bit_length()) for name, size in sizes.items())
    found = [first, *(dataclasses.replace(first, **change) for change in changes if fits(change))]
    if not steps and T <= 4 * MAX_STEPS:
        found.append(dataclasses.replace(first, schedule="recurrent"))
    legal = [cfg for cfg in dict.fromkeys(found) if cfg is first or refusal(problem, cfg) is None]
    return legal[:MOST]


def refusal(problem: LinearProblem, cfg: LinearConfig) -> str | None:
    """Why the kernels do not run with a configuration: a field that they cannot follow, or that nothing would read."""
    if cfg.block_q not in ROWS:
        return f"block_q must be one of {', '.join(map(str, ROWS))} on triton; got {cfg.block_q}"
    if cfg.block_k is not None and _one_tile(problem):
        return (
            f"block_k must be None for a call without gates whose state is one tile of key channels "
            f"(K = {problem.shape[3]}): nothing would read it; got {cfg.block_k}"
        )
    return None


def _one_tile(problem: LinearProblem) -> bool:
    gates = (problem.g, problem.g_gamma, problem.gk, problem.gv)
    _, _, _, K, V = problem.shape
    return all(gate is None for gate in gates) and max(K, V) <= (128 if _all_bfloat16(problem) else 64)


def _all_bfloat16(problem: LinearProblem) -> bool:
    return all(x.dtype == jnp.bfloat16 for x in (problem.query, problem.key, problem.value))
