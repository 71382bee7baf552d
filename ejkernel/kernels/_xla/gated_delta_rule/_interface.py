"""`gated_delta_rule` on xla, and how this platform picks its configs."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from ejkernel.kernels._delta import GATED_DELTA_RULE, DeltaProblem, GatedDeltaRuleConfig
from ejkernel.kernels._implementation import Implementation, PlatformFunction
from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._xla.gated_delta_rule import _heuristics
from ejkernel.kernels._xla.gated_delta_rule._solve import solve


class XlaDeltaRule(Implementation[DeltaProblem, GatedDeltaRuleConfig]):
    """The delta rule in plain JAX: every device, every dtype, every transformation."""

    def heuristic(self, problem: DeltaProblem) -> GatedDeltaRuleConfig:
        return _heuristics.heuristic(problem)

    def candidates(self, problem: DeltaProblem) -> Sequence[GatedDeltaRuleConfig]:
        return _heuristics.candidates(problem)

    def route(self, problem: DeltaProblem, cfg: GatedDeltaRuleConfig) -> str:
        """The schedule, and for chunks the gate that shapes them."""
        if cfg.schedule == "recurrent":
            return "steps"
        return "chunks, gate per key channel" if problem.per_channel else "chunks"

    def solve(self, problem: DeltaProblem, cfg: GatedDeltaRuleConfig) -> tuple[jax.Array, jax.Array]:
        output, final_state = solve(problem, cfg)
        return problem.finish(output), final_state


gated_delta_rule = kernel_registry.register("gated_delta_rule", Platform.XLA, Backend.ANY)(
    PlatformFunction(GATED_DELTA_RULE, XlaDeltaRule(), "xla")
)
