"""A gate per key channel, bfloat16, chunks of 64 rows."""

from __future__ import annotations

import dataclasses

from ejkernel.kernels._triton.linear._call import Call
from ejkernel.kernels._triton.linear._chunks import Array
from ejkernel.kernels._triton.linear._plan import Plan, tile
from ejkernel.kernels._triton.linear.routes.axis import AxisLaunch, axes, gradients, gradients_of_axes, scores_in_blocks
from ejkernel.kernels._triton.linear.routes.route import Changes, Gradients, Route, Saved
from ejkernel.kernels._triton.linear.routes.rows import GatedRows, padded, rows_of_keys
from ejkernel.kernels._triton.linear.routes.scans import scan_rows, wide_tiles

CHANGES: Changes = (
    {"block_d": 32}, {"num_warps": 8}, {"num_warps": 8, "block_d": 32}, {"num_stages": 2}, {"num_stages": 2, "block_d": 32},
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class KeyGate(Route):
    """Gated rows and intra-chunk scores of the key channels are made chunk by chunk. A scan of them makes the outputs and, back
    in time, dv. The gradient of the key channels is then made chunk by chunk.
    """

    wide_tiles: bool
    title = "key gate"
    covers = "gk or g [B, T, H, K], with or without g and g_gamma per head; K up to 256, bfloat16, chunks of 64"

    @classmethod
    def covering(cls, plan: Plan) -> Route | None:
        gated = "gk" in plan.gates and "gv" not in plan.gates
        if not (gated and plan.bfloat16 and plan.C == 64 and tile(plan.K, 512) <= 256):
            return None
        return cls(plan, wide_tiles(plan, padded(plan.K)))

    @property
    def name(self) -> str:
        return self.title + (", wide tiles" if self.wide_tiles else "")

    def forward(self, call: Call, keep: bool) -> tuple[Array, Array, Saved]:
        rows = rows_of_keys(call, block_decays=keep, low=keep)
        scanned = scan_rows(
            call, rows.as_arguments(low=False), call.arrays["value"], call.get("initial_state"), call.plan.output,
            wide=self.wide_tiles, adjoint=False, keep=keep,
        )  # fmt: skip
        return scanned.output, scanned.final, {"states": scanned.states, "keys": rows} if keep else {}

    def backward(self, call: Call, saved: Saved, do: Array, dfinal: Array | None) -> Gradients:
        rows: GatedRows = saved["keys"]
        dtype = call.per_head_dtype(call.arrays["value"])
        # With the low part of the scores: nothing else rounds what goes from do to dv inside a chunk.
        scanned = scan_rows(
            call, rows.as_arguments(low=True, adjoint=True), do, dfinal, dtype, wide=self.wide_tiles, adjoint=True, keep=True
        )
        own, other = axes(call, do)
        of_keys, _ = gradients_of_axes(call)
        blocked = scores_in_blocks(call, do, call.arrays["value"], rows.gates.weak, call.plan.scale)
        keys = AxisLaunch(call, own, other, rows.gates, None, blocked, saved["states"], scanned.states, of_keys).everywhere()
        return gradients(call, keys, {"dy": scanned.output}, scanned.final)

    def changes(self) -> Changes:
        return CHANGES
