"""What users call: the operation, and the kernel that the executor picks a configuration for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

from ejkernel.modules import create_default_executor
from ejkernel.ops import Invocation, Kernel
from tests.toy.kernels import registry
from tests.toy.kernels.decayed_sum import SumConfig, SumProblem


class DecayedSum(Kernel[SumConfig, jax.Array]):
    """`decayed_sum` as the executor sees it."""

    op_id = "decayed_sum"

    def run(self, problem: SumProblem, *, platform: str | None = None, cfg: SumConfig) -> jax.Array:
        return registry.select(self.op_id, platform or cfg.platform, problem=problem).function.solve(problem, cfg)

    def heuristic_cfg(self, inv: Invocation) -> SumConfig:
        best = registry.select(self.op_id, inv.arguments["platform"], problem=inv.arguments["problem"])
        return SumConfig(best.function.blocks[0], str(best.platform))

    def candidate_cfgs(self, inv: Invocation) -> Iterable[SumConfig]:
        for entry in registry.list_implementations(self.op_id):
            asked = inv.arguments["platform"] in (None, "auto", entry.platform)
            if asked and registry.refusal(entry, inv.arguments["problem"]) is None:
                yield from (SumConfig(block, str(entry.platform)) for block in entry.function.blocks)

    def length_axes(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (1,) if name == "problem.x" else ()


def decayed_sum(x: Any, decay: float = 1.0, *, platform: str | None = None, cfg: SumConfig | None = None) -> jax.Array:
    """y_t = decay * y_{t-1} + x_t over the second axis of `x [B, T, D]`."""
    problem = SumProblem.from_arguments(x, decay)
    return create_default_executor()(DecayedSum(), problem, platform=platform, _cfg=cfg)
