"""`gated_delta_rule` on xla, and how this platform picks its configs."""

from __future__ import annotations

from collections.abc import Sequence

import jax

from ejkernel.kernels._delta import GATED_DELTA_RULE, DeltaProblem, GatedDeltaRuleConfig
from ejkernel.kernels._implementation import Implementation
from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._xla.gated_delta_rule import _heuristics, _solve
from ejkernel.kernels._xla.linear._heuristics import no_tiles


class XlaDeltaRule(Implementation[DeltaProblem, GatedDeltaRuleConfig]):
    """The delta rule in plain JAX: every device, every dtype, every transformation."""

    def refuses(self, problem: DeltaProblem, cfg: GatedDeltaRuleConfig) -> str | None:
        return no_tiles(cfg)

    def heuristic(self, problem: DeltaProblem) -> GatedDeltaRuleConfig:
        return _heuristics.heuristic(problem)

    def candidates(self, problem: DeltaProblem) -> Sequence[GatedDeltaRuleConfig]:
        return _heuristics.candidates(problem)

    def route(self, problem: DeltaProblem, cfg: GatedDeltaRuleConfig) -> str:
        return _solve.route(problem, cfg)

    def solve(self, problem: DeltaProblem, cfg: GatedDeltaRuleConfig) -> tuple[jax.Array, jax.Array]:
        output, final_state = _solve.solve(problem, cfg)
        return problem.finish(output), final_state


gated_delta_rule = GATED_DELTA_RULE.register(XlaDeltaRule(), kernel_registry, Platform.XLA, Backend.ANY)
