"""The gated delta rule on Triton."""

from __future__ import annotations

from ejkernel.kernels._delta import DeltaProblem, GatedDeltaRuleConfig
from ejkernel.kernels._linear.config import Schedule
from ejkernel.kernels._triton._recurrence import MAX_STEPS, TritonRecurrence
from ejkernel.kernels._triton.gated_delta_rule._plan import delta_plan
from ejkernel.kernels._triton.gated_delta_rule.routes import route_of
from ejkernel.kernels._triton.linear._chunks import Array
from ejkernel.kernels._triton.linear.routes.route import Route


class TritonDeltaRule(TritonRecurrence[DeltaProblem, GatedDeltaRuleConfig]):
    """The delta rule with any gate on NVIDIA GPUs from compute capability 8.0.

    What a field of a configuration does:

        block_q      tokens per chunk, in every kernel
        block_d      value channels per tile of the scans
        num_warps    of the scans, and of a head gate's gradient
        num_stages   loads in flight: the same kernels
    """

    max_channels = 256
    rows = (16, 32, 64)

    def taken(self, problem: DeltaProblem, cfg: GatedDeltaRuleConfig) -> Route:
        return route_of(delta_plan(problem, cfg))

    def refuses(self, problem: DeltaProblem, cfg: GatedDeltaRuleConfig) -> str | None:
        if cfg.block_k is not None:
            return f"block_k must be None on triton, where a program holds all key channels of a state; got {cfg.block_k}"
        return super().refuses(problem, cfg)

    def heuristic(self, problem: DeltaProblem) -> GatedDeltaRuleConfig:
        """From measurements on an H200 (benchmarks/NOTES_gpu.md). Chunks of 32 rows in float32 cost fewer digits where keys are
        alike, and fit."""
        schedule: Schedule = "recurrent" if problem.shape[1] <= MAX_STEPS else "chunked"
        rows = 64 if problem.query.dtype.itemsize == 2 else 32
        return GatedDeltaRuleConfig(schedule=schedule, block_q=rows, platform="triton", backend="gpu")

    def solve(self, problem: DeltaProblem, cfg: GatedDeltaRuleConfig) -> tuple[Array, Array]:
        output, final_state = super().solve(problem.normalised(), cfg)
        return problem.finish(output), final_state
