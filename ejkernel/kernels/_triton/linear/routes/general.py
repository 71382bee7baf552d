"""Gates per channel of any dtype, in chunks of any length: what the routes for bfloat16 and chunks of 64 rows leave."""

from __future__ import annotations

import dataclasses
from typing import Any

from ejkernel.callib import cdiv, triton_call
from ejkernel.kernels._triton.linear._call import Call, heads, shape, states_in_chunks
from ejkernel.kernels._triton.linear._chunks import Array
from ejkernel.kernels._triton.linear._plan import Plan, tile
from ejkernel.kernels._triton.linear.kernels import general_axis
from ejkernel.kernels._triton.linear.routes.axis import Axis, Outputs, axes, gradients, gradients_of_axes, output_alone
from ejkernel.kernels._triton.linear.routes.key_gate import CHANGES as KEY_CHANGES
from ejkernel.kernels._triton.linear.routes.route import Changes, Gradients, Route, Saved
from ejkernel.kernels._triton.linear.routes.scans import scan_states

VALUE_CHANGES: Changes = (
    {"block_d": 32}, {"block_k": 32}, {"block_k": 32, "block_d": 32}, {"num_warps": 8}, {"block_q": 32},
    {"block_q": 32, "num_warps": 8},
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class General(Route):
    """A scan stores the state before every chunk; outputs and gradients of either axis are made from them chunk by chunk."""

    title = "general"
    covers = "every other call with a gate per channel: float32, float16, gv alone, other chunks, more than 256 key channels"

    @classmethod
    def covering(cls, plan: Plan) -> Route | None:
        return cls(plan)

    def forward(self, call: Call, keep: bool) -> tuple[Array, Array, Saved]:
        _, k, v = call.query_key_value
        states, final = scan_states(call, k, v, call.get("initial_state"))
        keys, values = axes(call, None)
        scores = scores_of_axis(call, keys)
        output = one_axis(call, values, keys, scores, states, None, output_alone(call))["dx"]
        return output, final, {"states": states, "scores": scores} if keep else {}

    def stored_bytes(self, call: Call) -> int:
        return states_in_chunks(call)

    def recomputed(self, call: Call) -> Saved:
        _, k, v = call.query_key_value
        return {
            "states": scan_states(call, k, v, call.get("initial_state"))[0],
            "scores": scores_of_axis(call, axes(call, None)[0]),
        }

    def backward(self, call: Call, saved: Saved, do: Array, dfinal: Array | None) -> Gradients:
        ends, dinitial = scan_states(call, call.arrays["query"], do, dfinal, adjoint=True)
        keys, values = axes(call, do)
        of_keys, of_values = gradients_of_axes(call)
        states = saved["states"]
        dkeys = one_axis(call, keys, values, scores_of_axis(call, values), states, ends, of_keys)
        dvalues = one_axis(call, values, keys, saved["scores"], states, ends, of_values)
        return gradients(call, dkeys, dvalues, dinitial)

    def changes(self) -> Changes:
        return VALUE_CHANGES if "gv" in self.plan.gates else KEY_CHANGES


def scores_of_axis(call: Call, own: Axis) -> Array | None:
    """The intra-chunk scores [chunks, H, C, C] of an axis with a gate; None for one without, whose scores need no kernel."""
    if own.gate is None:
        return None
    plan, H, chunks = call.plan, call.dims[2], call.chunks
    D = own.y.shape[3]
    arguments = {
        "x": own.x, "y": own.y, "g": own.gate, "gs": call.get("g"), "gamma": call.get("g_gamma"), "scale": own.scale,
        **chunks.arguments,
    }  # fmt: skip
    found = triton_call(
        arguments=arguments, out_shape={"A": shape((chunks.count, H, plan.C, plan.C), plan.operand)},
        kernel=general_axis.gated_scores, grid=(chunks.count * H,), HX=heads(own.x), HY=heads(own.y), HG=heads(own.gate),
        FOLD=own.with_head_gates, D=D, BD=tile(D, 64 if plan.bfloat16 else 32), LEVELS=plan.C.bit_length() - 1,
        GATE_PARTS=call.gate_parts, num_warps=plan.num_warps or 4, num_stages=1, shrink_stages=call.shrinks_stages,
        **call.constants(),
    )  # fmt: skip
    return found["A"]


def one_axis(
    call: Call, own: Axis, other: Axis, other_scores: Array | None, starts: Array, ends: Array | None, out: Outputs,
    strict: bool = False,
) -> dict[str, Array]:  # fmt: skip
    """`general_gated_axis`, or `ungated_axis` for an axis without a gate: those of dx, dy, dg that `out` asks for.

    strict: no row has a score with itself.
    """
    plan, H, chunks = call.plan, call.dims[2], call.chunks
    D, D2 = own.y.shape[3], other.y.shape[3]
    wide = 64 if plan.bfloat16 else 32
    BD = own.block(call) or tile(D, wide if own.gate is not None else 2 * wide)
    B2 = other.block(call) or tile(D2, wide)
    scale = own.scale * other.scale  # that of the key channels: the value channels' is 1
    tiles = cdiv(D, BD)
    programs = cdiv(D, BD * tiles) * chunks.count * H
    arguments = {
        "x": own.x if out["dy"] is not None else None, "y": own.y, "x2": other.x, "y2": other.y, "g2": other.gate,
        "A2": other_scores, "gs": call.get("g"), "gamma": call.get("g_gamma"), "starts": starts, "ends": ends,
        "scale": scale,
        # Scores of the key channels are scaled already.
        "scale_scores": 1.0 if other_scores is not None and other.of_keys else scale, **chunks.arguments,
    }  # fmt: skip
    constants: dict[str, Any] = dict(
        call.constants(), HX=heads(own.x), HY=heads(own.y), HX2=heads(other.x), HY2=heads(other.y), HG2=heads(other.gate),
        FOLD2=other.with_head_gates, D=D, D2=D2, BD=BD, B2=B2, TILES=tiles, STRIDE=own.stride, STRIDE2=other.stride,
        GATE_PARTS=call.gate_parts, num_warps=plan.num_warps or 4, num_stages=1, shrink_stages=call.shrinks_stages,
    )  # fmt: skip
    if own.gate is None:
        return triton_call(
            arguments=arguments, out_shape={"dx": out["dx"], "dy": out["dy"]}, kernel=general_axis.ungated_axis,
            grid=(programs,), **constants,
        )  # fmt: skip
    parts = 2 if plan.C == 64 else 1  # tiles of 64 rows do not fit the registers
    C = plan.C // parts
    return triton_call(
        arguments={**arguments, "g": own.gate}, out_shape=out, kernel=general_axis.general_gated_axis,
        grid=(parts * programs,), HG=heads(own.gate), FOLD=own.with_head_gates, LEVELS=C.bit_length() - 1,
        STAGES=plan.num_stages or 1, PARTS=parts, STRICT=strict, **{**constants, "C": C},
    )  # fmt: skip
