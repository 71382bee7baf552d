"""The linear operations on xla: plain JAX, for every device that XLA compiles for."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from ejkernel.kernels._implementation import Implementation
from ejkernel.kernels._linear import LinearConfig, LinearProblem
from ejkernel.kernels._linear.operations import register
from ejkernel.kernels._registry import Backend, Platform
from ejkernel.kernels._xla.linear import _heuristics, _solve


class XlaLinear(Implementation[LinearProblem, LinearConfig]):
    """Takes every call with every configuration; tiles of channels are XLA's own choice."""

    def refuses(self, problem: LinearProblem, cfg: LinearConfig) -> str | None:
        return _heuristics.no_tiles(cfg)

    def heuristic(self, problem: LinearProblem) -> LinearConfig:
        return _heuristics.heuristic(problem)

    def candidates(self, problem: LinearProblem) -> Sequence[LinearConfig]:
        return _heuristics.candidates(problem)

    def route(self, problem: LinearProblem, cfg: LinearConfig) -> str:
        return _solve.route(problem, cfg)

    def solve(self, problem: LinearProblem, cfg: LinearConfig) -> tuple[jax.Array, jax.Array]:
        return _solve.solve(problem, cfg)


recurrent, recurrent_gla, lightning_attn = register(XlaLinear(), Platform.XLA, Backend.ANY)
