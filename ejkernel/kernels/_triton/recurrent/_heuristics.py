"""Which schedule and tiles suit a call on triton, from measurements on an H200 (benchmarks/NOTES_gpu.md)."""

from __future__ import annotations

from ejkernel.kernels._linear import LinearConfig, LinearProblem
from ejkernel.kernels._linear.config import Schedule

MAX_STEPS = 16  # tokens up to which one launch, step by step, beats chunks


def heuristic(problem: LinearProblem) -> LinearConfig:
    schedule: Schedule = "recurrent" if problem.shape[1] <= MAX_STEPS else "chunked"
    return LinearConfig(schedule=schedule, block_q=64, platform="triton", backend="gpu")
