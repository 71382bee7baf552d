"""Which schedule and chunk length suit a call on xla, from measurements (benchmarks/RESULTS.md).

On a CPU a step costs one pass over the state, which is cheap while the states of a few heads stay in the cache, and a chunk
costs small matrix products. So small states go step by step in the forward pass, wide ones by chunks; a decay that is one
number per head makes chunks cheaper and moves the border down. On accelerators a step is a kernel launch or worse.
"""

from __future__ import annotations

import jax

from ejkernel.kernels._linear import LinearConfig, LinearProblem
from ejkernel.kernels._linear.config import Schedule

FEW_TOKENS = 8  # below, steps are cheaper than building a chunk on any device
NARROW, MIDDLE = 32 * 32, 64 * 64  # K * V


def heuristic(problem: LinearProblem) -> LinearConfig:
    """The configuration for a call that nobody has measured."""
    _, T, _, K, V = problem.shape
    if T <= FEW_TOKENS:
        return _config(problem, "recurrent", T)
    if jax.default_backend() != "cpu":
        return _config(problem, "chunked", 64)
    per_channel = problem.gk is not None or problem.gv is not None
    stepwise = K * V <= MIDDLE and (per_channel or K * V > NARROW)
    if stepwise:
        return _config(problem, "recurrent", 64 if T > 2048 else 32)  # longer chunks keep fewer states
    wide = K * V > MIDDLE
    return _config(problem, "chunked", 128 if wide and per_channel else 64 if wide or T > 2048 else 32)


def candidates(problem: LinearProblem) -> list[LinearConfig]:
    """The configurations worth measuring: both schedules, and the chunk lengths that are ever best."""
    if problem.shape[1] <= FEW_TOKENS:
        return [_config(problem, "recurrent", problem.shape[1]), _config(problem, "chunked", problem.shape[1])]
    found = [_config(problem, schedule, rows) for schedule in ("recurrent", "chunked") for rows in (16, 32, 64, 128)]
    return list(dict.fromkeys(found))


def _config(problem: LinearProblem, schedule: Schedule, rows: int) -> LinearConfig:
    """A chunk no longer than the call or the mean packed sequence: a slot costs the same whether it is full or not."""
    tokens = max(problem.shape[1], 1)
    if problem.cu_seqlens is not None:
        tokens = max(tokens // max(problem.sequences, 1), 1)
    longest = 1 << max(tokens - 1, 0).bit_length()
    shortest = 1 << max(rows - 1, 0).bit_length()
    return LinearConfig(schedule, min(shortest, longest), platform="xla")
