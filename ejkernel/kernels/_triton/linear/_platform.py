"""Linear attention on Triton."""

from __future__ import annotations

from ejkernel.kernels._linear import LinearConfig, LinearProblem
from ejkernel.kernels._linear.config import Schedule
from ejkernel.kernels._triton._recurrence import MAX_STEPS, TritonRecurrence
from ejkernel.kernels._triton.linear._plan import ROWS, Plan
from ejkernel.kernels._triton.linear.routes import Route, route_of


class TritonLinear(TritonRecurrence[LinearProblem, LinearConfig]):
    """The recurrence with any gates on NVIDIA GPUs from compute capability 8.0.

    What a field of a configuration does:

        block_q      tokens per chunk, in every kernel
        block_k      key channels per tile: the scan of states, the gradient; not where the whole state is one tile (which with
                     gates on keys and values it may be in the forward alone)
        block_d      value channels per tile: every kernel that scans states or writes outputs or a value gate's gradient
        num_warps    every kernel but those that make gated rows, and those of one gated axis in bfloat16
        num_stages   loads in flight: every loop over chunks, and over channels of a head gate's gradient

    With 129 to 256 key channels, any of block_d, num_warps and num_stages takes `scan_rows` with them instead of
    `scan_rows_wide`, whose tiles are fixed. So it is on Hopper with the kernels by warpgroups: each of these fields takes the
    portable ones with it instead, block_k those of the gradient.
    """

    max_channels = 512
    rows = ROWS

    def taken(self, problem: LinearProblem, cfg: LinearConfig) -> Route:
        return route_of(Plan.of(problem, cfg))

    def heuristic(self, problem: LinearProblem) -> LinearConfig:
        """From measurements on an H200 (benchmarks/NOTES_gpu.md)."""
        schedule: Schedule = "recurrent" if problem.shape[1] <= MAX_STEPS else "chunked"
        return LinearConfig(schedule=schedule, block_q=64, platform="triton", backend="gpu")
