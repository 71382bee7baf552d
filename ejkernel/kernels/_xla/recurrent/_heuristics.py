"""Which schedule and chunk length suit a call on xla, from measurements (benchmarks/RESULTS.md)."""

from __future__ import annotations

from ejkernel.kernels._linear import LinearConfig, LinearProblem


def heuristic(problem: LinearProblem) -> LinearConfig:
    return LinearConfig(platform="xla")


def candidates(problem: LinearProblem) -> list[LinearConfig]:
    return [LinearConfig(platform="xla")]
