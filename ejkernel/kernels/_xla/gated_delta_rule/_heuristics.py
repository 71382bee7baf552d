"""Which schedule and chunk length suit a call on xla, from measurements (benchmarks/RESULTS.md).

On a CPU a step costs two passes over the states, which is cheap while one stays in the inner cache: up to 64 x 64 the forward
pass goes step by step, beyond by chunks. The backward pass is always chunked, and 32 tokens are best for it. On accelerators a
step is a kernel launch or worse. Chunks of 64 would also cost digits where keys are correlated and beta is near 2.
"""

from __future__ import annotations

from typing import Any

from ejkernel.kernels._delta import DeltaProblem, GatedDeltaRuleConfig
from ejkernel.kernels._linear.config import Schedule

FEW_TOKENS = 8  # below, steps are cheaper than building a chunk on any device
SMALL_STATE = 64 * 64  # K * V


def heuristic(problem: DeltaProblem) -> GatedDeltaRuleConfig:
    """The configuration for a call that nobody has measured."""
    _, T, _, K, V = problem.shape
    if isinstance(T, int) and T <= FEW_TOKENS:
        return _config(problem, "recurrent", T)
    stepwise = problem.device.backend == "cpu" and K * V <= SMALL_STATE
    return _config(problem, "recurrent" if stepwise else "chunked", 32)


def candidates(problem: DeltaProblem) -> list[GatedDeltaRuleConfig]:
    """The configurations worth measuring: both schedules, and the chunk lengths that are ever best."""
    T = problem.shape[1]
    if not isinstance(T, int):
        return [heuristic(problem)]
    if T <= FEW_TOKENS:
        return [_config(problem, "recurrent", T), _config(problem, "chunked", T)]
    found = [_config(problem, schedule, rows) for schedule in ("recurrent", "chunked") for rows in (16, 32, 64, 128)]
    return list(dict.fromkeys(found))


def _config(problem: DeltaProblem, schedule: Schedule, rows: int) -> GatedDeltaRuleConfig:
    return GatedDeltaRuleConfig(schedule, fitting_rows(problem, rows), platform="xla")


def fitting_rows(problem: DeltaProblem, rows: int) -> int:
    """A chunk no longer than the call or the mean packed sequence: it costs the same whether it is full or not."""
    tokens: Any = problem.shape[1]
    if not isinstance(tokens, int):
        return rows
    if problem.cu_seqlens is not None:
        tokens = tokens // max(problem.sequences, 1)
    return min(1 << max(rows - 1, 0).bit_length(), 1 << max(tokens - 1, 0).bit_length())
