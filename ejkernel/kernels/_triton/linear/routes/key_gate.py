"""A gate per key channel, bfloat16, chunks of 64 rows."""

from __future__ import annotations

import dataclasses

from ejkernel.callib import triton_call
from ejkernel.kernels._triton.linear._call import Call, heads
from ejkernel.kernels._triton.linear._chunks import Array
from ejkernel.kernels._triton.linear._plan import Plan, tile
from ejkernel.kernels._triton.linear.kernels import other_axis
from ejkernel.kernels._triton.linear.routes.axis import AxisLaunch, axes, blocked_shapes, gradients, gradients_of_axes
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
        blocked = self._blocked_scores(call, do, rows)
        keys = AxisLaunch(call, own, other, rows.gates, None, blocked, saved["states"], scanned.states, of_keys).everywhere()
        return gradients(call, keys, {"dy": scanned.output}, scanned.final)

    def _blocked_scores(self, call: Call, do: Array, rows: GatedRows) -> dict[str, Array]:
        """The scores of the value channels, do v^T, in those chunks that are not weakly gated."""
        plan, (_, _, H, _, V), chunks = call.plan, call.dims, call.chunks
        v = call.arrays["value"]
        return triton_call(
            arguments={"x": do, "y": v, "weak": rows.gates.weak, "scale": plan.scale, **chunks.arguments},
            out_shape=blocked_shapes(call, 1), kernel=other_axis.scores_in_blocks, grid=(chunks.count * H,), H=H, HX=H,
            HY=heads(v), D=V, BD=tile(V, 128), SIGN=plan.sign, EVEN=chunks.even, PREC=plan.precision, num_warps=4,
            num_stages=1,
        )  # fmt: skip

    def changes(self) -> Changes:
        return CHANGES
