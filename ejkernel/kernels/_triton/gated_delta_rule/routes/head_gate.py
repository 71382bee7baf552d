"""The delta rule with one gate per head, or none: any dtype."""

from __future__ import annotations

import dataclasses

import numpy as np

from ejkernel.callib import triton_call
from ejkernel.kernels._triton.gated_delta_rule.kernels import head_gradients
from ejkernel.kernels._triton.gated_delta_rule.routes.launches import (
    Rows,
    ScannedBack,
    by_warpgroups,
    head_gate_rows,
    scan,
    scan_back,
)
from ejkernel.kernels._triton.linear._call import Call, heads, shape
from ejkernel.kernels._triton.linear._chunks import Array
from ejkernel.kernels._triton.linear._plan import Plan, tile
from ejkernel.kernels._triton.linear.routes.route import Changes, Gradients, Route, Saved

CHANGES: Changes = (
    {"block_d": 32}, {"block_d": 64}, {"num_warps": 8}, {"num_stages": 1}, {"block_d": 32, "num_warps": 2}, {"block_q": 32},
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class DeltaHeadGate(Route):
    """The correction of each chunk is made first; a scan reads every input once and makes the outputs. The gradient scans back
    for dv and dbeta, then does dq, dk and dg chunk by chunk."""

    title = "delta rule, head gate"
    covers = "g [B, T, H] or no gate"

    @classmethod
    def covering(cls, plan: Plan) -> Route | None:
        return cls(plan) if plan.per_head else None

    def forward(self, call: Call, keep: bool) -> tuple[Array, Array, Saved]:
        correction, rows = head_gate_rows(call, with_scores=not by_warpgroups(call.plan))
        found = scan(call, rows, correction, keep)
        saved = {**found.kept(correction), "scores": found.scores, **call.kept_log_decays} if keep else {}
        return found.output, found.final, saved

    def backward(self, call: Call, saved: Saved, do: Array, dfinal: Array | None) -> Gradients:
        rows = Rows(call.arrays["query"], call.arrays["key"], saved["scores"])
        back = scan_back(call, rows, saved, do, dfinal)
        found = _chunk_gradients(call, do, saved, back)
        return Gradients(found["dq"], found["dk"], back.value, back.initial_state, found.get("dg"), beta=back.beta)

    def changes(self) -> Changes:
        return CHANGES


def _chunk_gradients(call: Call, do: Array, saved: Saved, back: ScannedBack) -> dict[str, Array]:
    """Per value head: dq, dk [B, T, H, K], and dg [B, T, H] of the log decays if there are."""
    plan, (B, T, H, K, V), chunks = call.plan, call.dims, call.chunks
    q, k = call.arrays["query"], call.arrays["key"]
    out = {
        "dq": shape((B, T, H, K), call.per_head_dtype(q)), "dk": shape((B, T, H, K), call.per_head_dtype(k)),
        "dg": shape((B, T, H), np.float32) if plan.gates else None,
    }  # fmt: skip
    arguments = {
        "q": q, "k": k, "beta": call.arrays["beta"], "gs": call.head_gates["gs"], "do": do, "dv": back.value,
        "errors": saved["errors"], "starts": saved["states"], "ends": back.ends, "scale": plan.scale, **chunks.arguments,
    }  # fmt: skip
    return triton_call(
        arguments=arguments, out_shape=out, kernel=head_gradients.delta_head_gradients, grid=(chunks.count * H,),
        HK=heads(k), K=K, V=V, BK=tile(K, 32), BV=tile(V, 128 if plan.bfloat16 else 64), EXACT=plan.exact,
        num_warps=plan.num_warps or 4, num_stages=plan.num_stages or (2 if max(K, V) <= 128 else 1),
        # Named for wide float32 calls, since ptxas takes 32 by itself there and spills everything else.
        maxnreg=255 if plan.exact and max(K, V) > 128 else None, shrink_stages=call.shrinks_stages, **call.constants(),
    )  # fmt: skip
