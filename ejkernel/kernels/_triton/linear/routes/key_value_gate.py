"""Gates on keys and values, per channel each, bfloat16, chunks of 64 rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.callib import cdiv, triton_call
from ejkernel.kernels._triton._gluon import HAS_GLUON
from ejkernel.kernels._triton.linear._call import Call, heads, shape, states_in_chunks
from ejkernel.kernels._triton.linear._chunks import Array, Segments
from ejkernel.kernels._triton.linear._plan import Plan, gate_parts, tile
from ejkernel.kernels._triton.linear.kernels import key_value_scan, other_axis, weak_chunks
from ejkernel.kernels._triton.linear.routes.axis import (
    AxisLaunch,
    axes,
    blocked_shapes,
    gradients,
    gradients_of_axes,
    output_alone,
)
from ejkernel.kernels._triton.linear.routes.route import Changes, Gradients, Route, Saved
from ejkernel.kernels._triton.linear.routes.rows import GatedRows, GateRange, rows_of_keys, rows_of_values
from ejkernel.kernels._triton.linear.routes.scans import Ends

if HAS_GLUON:
    from ejkernel.kernels._triton.linear.kernels import key_value_warpgroups

OUTPUTS_SHARED = 202 << 10  # bytes that a program of `scan_key_value` takes
CHANGES: Changes = (
    {"block_d": 32}, {"block_d": 64}, {"block_k": 32}, {"block_k": 32, "block_d": 32}, {"num_stages": 1},
    {"num_stages": 1, "block_d": 64},
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class KeyValueGate(Route):
    """Gated rows of both axes are made chunk by chunk. One scan makes the outputs of chunks whose values are weakly gated, or
    only the states; the rest, and the gradients of either axis, are made chunk by chunk from the other axis' rows.

    Every operand is high and low part of bfloat16, so that a result has only its own rounding.
    """

    outputs_in_scan: bool
    title = "key and value gate"
    covers = "gk and gv, with or without g and g_gamma; bfloat16, chunks of 64"

    @classmethod
    def covering(cls, plan: Plan) -> Route | None:
        if not ({"gk", "gv"} <= plan.gates and plan.bfloat16 and plan.C == 64):
            return None
        # The scan holds a state of up to 128 key channels, in two parts of at least 16, which K must reach into both.
        return cls(plan, 32 <= tile(plan.K, 512) <= 128 and plan.shared >= OUTPUTS_SHARED)

    @property
    def name(self) -> str:
        return self.title + (", outputs in the scan" if self.outputs_in_scan else "")

    def forward(self, call: Call, keep: bool) -> tuple[Array, Array, Saved]:
        keys = rows_of_keys(call, block_decays=keep, split=2)
        of_keys, of_values = axes(call, None)
        launch = AxisLaunch  # of the value channels, from the rows of the keys
        if self.outputs_in_scan:
            gates = _gates_of_values(call)
            scanned = self._scan_outputs(call, keys, gates.weak, keep)
            states, final = scanned["states"], scanned["final"]
            blocked = _blocked_scores(call, keys, gates.weak, 1.0)
            values = launch(call, of_values, of_keys, gates, keys, blocked, states, None, output_alone(call))
            output = values.elsewhere({"dx": scanned["o"]})["dx"]
        else:
            rows = rows_of_values(call, None, block_decays=True)
            gates = rows.gates
            states, final = _scan_states(call, keys, rows, call.get("initial_state"), adjoint=False)
            blocked = _blocked_scores(call, keys, gates.weak, 1.0)
            values = launch(call, of_values, of_keys, gates, keys, blocked, states, None, output_alone(call))
            output = values.everywhere()["dx"]
        # The values' range is kept, too: found again by other sums, a chunk at the limit might count as weakly gated after all.
        saved = {"states": states, "blocked": blocked, "value_gates": gates, "keys": keys}
        return output, final, saved if keep else {}

    def stored_bytes(self, call: Call) -> int:
        return 2 * states_in_chunks(call)  # high and low part

    def backward(self, call: Call, saved: Saved, do: Array, dfinal: Array | None) -> Gradients:
        keys: GatedRows = saved["keys"]
        values = rows_of_values(call, do, block_decays=False)
        ends, dinitial = _scan_states(call, keys, values, dfinal, adjoint=True)
        key_axis, value_axis = axes(call, do)
        of_keys, of_values = gradients_of_axes(call)
        blocked = _blocked_scores(call, values, keys.gates.weak, call.plan.scale)
        states = saved["states"]
        dkeys = AxisLaunch(call, key_axis, value_axis, keys.gates, values, blocked, states, ends, of_keys).everywhere()
        dvalues = AxisLaunch(
            call, value_axis, key_axis, saved["value_gates"], keys, saved["blocked"], states, ends, of_values
        ).everywhere()
        return gradients(call, dkeys, dvalues, dinitial)

    def _scan_outputs(self, call: Call, keys: GatedRows, weak: Array, keep: bool) -> dict[str, Array]:
        """o where the values are weakly gated, final, and states where they are not, or everywhere if kept."""
        plan, (B, T, H, K, V), chunks = call.plan, call.dims, call.chunks
        v, gv = call.arrays["value"], call.arrays["gv"]
        BV = plan.block_d or (128 if V > 64 else 64)  # 0.28 against 0.34 ms with 128 channels: q and k are read once
        segments = call.segments(cdiv(V, BV))
        arguments = {**keys.as_arguments(low=True), "v": v, "gv": gv, "weak": weak, **chunks.arguments, **segments.arguments}
        common: dict[str, Any] = {
            "H": H, "HV": heads(v), "HG": heads(gv), "K": K, "KP": keys.chunk_decay.shape[2], "V": V, "BV": BV,
            "SIGN": plan.sign, "EVEN": chunks.even, "KEEP": keep, "GATE_PARTS": gate_parts(plan, gv),
            "STAGES": plan.num_stages or 2, "num_warps": plan.num_warps or (8 if BV > 64 else 4),
            "shrink_stages": call.shrinks_stages, "kernel": key_value_scan.scan_key_value,
            "grid": (cdiv(V, BV) * segments.count * H,),
        }  # fmt: skip
        ends = Ends()
        if segments.split:
            nothing = dict.fromkeys(("begin", "ends", "end_decay", "end_decay_v"))
            final, decay, decay_v = _ends_shapes(call, segments)
            out = {"o": None, "final": final, "states": None, "segment_decay": decay, "segment_decay_v": decay_v}
            found = triton_call(arguments={**arguments, **nothing}, out_shape=out, **common)
            ends = Ends(found["final"], found["segment_decay"], found["segment_decay_v"])
        before = {
            "begin": call.get("initial_state"), "ends": ends.states, "end_decay": ends.key_decays,
            "end_decay_v": ends.value_decays,
        }  # fmt: skip
        out = {
            "o": shape((B, T, H, V), plan.output), "final": shape((call.sequences, H, K, V), np.float32),
            "states": shape((chunks.count, H, 2, K, V), plan.operand), "segment_decay": None, "segment_decay_v": None,
        }  # fmt: skip
        if _scanned_by_warpgroups(plan, v, gv):
            names = ("H", "HV", "HG", "SIGN", "EVEN", "KEEP", "grid")
            out = {name: out[name] for name in ("o", "final", "states")}
            common = {
                **{name: common[name] for name in names}, "kernel": key_value_warpgroups.key_value_scan_by_warpgroups,
                "C": plan.C, "COPY_REGISTERS": 56, "VALUE_REGISTERS": 224,
            }  # fmt: skip
        return triton_call(arguments={**arguments, **before}, out_shape=out, **common)

    def changes(self) -> Changes:
        return CHANGES


def _scanned_by_warpgroups(plan: Plan, v: Array, gv: Array) -> bool:
    """Whether `key_value_scan_by_warpgroups` makes the outputs and states."""
    covered = plan.warpgroups and not plan.named_scan_tiles
    return covered and plan.K == plan.V == 128 and v.dtype == gv.dtype == jnp.bfloat16


def _gates_of_values(call: Call) -> GateRange:
    """What the value gate alone tells of the value channels."""
    plan, (_, _, H, _, V), chunks = call.plan, call.dims, call.chunks
    gv = call.arrays["gv"]
    found = triton_call(
        arguments={"g": gv, **chunks.arguments}, kernel=weak_chunks.find_weak_chunks, grid=(chunks.count, H), H=H, HG=heads(gv),
        D=V, BD=tile(V, 128), SIGN=plan.sign, LIMIT=plan.weak_limit, num_warps=2, num_stages=1,
        out_shape={"weak": shape((chunks.count, H), np.int32), "block_decays": shape((chunks.count, H, 8, V), np.float32)},
    )  # fmt: skip
    return GateRange(found["weak"], found["block_decays"])


def _ends_shapes(call: Call, segments: Segments) -> list[jax.ShapeDtypeStruct]:
    """Of each segment's end and of its decays per key and per value channel."""
    G, (_, _, H, K, V) = segments.count, call.dims
    return [shape((G, H, K, V), np.float32), shape((G, H, K), np.float32), shape((G, H, V), np.float32)]


def _blocked_scores(call: Call, rows: GatedRows, weak: Array, scale: float) -> dict[str, Array]:
    """`scale` times the scores of an axis in block order, for those chunks of the other one that are not `weak`."""
    plan, H, chunks = call.plan, call.dims[2], call.chunks
    return triton_call(
        arguments={"A": rows.scores, "A_low": rows.scores_low, "weak": weak, "scale": scale, **chunks.arguments},
        out_shape=blocked_shapes(call, 2), kernel=other_axis.stored_scores_in_blocks, grid=(chunks.count * H,), H=H,
        SIGN=plan.sign, num_warps=4,
    )  # fmt: skip


def _scan_states(call: Call, keys: GatedRows, values: GatedRows, begin: Array | None, *, adjoint: bool) -> tuple[Array, Array]:
    """(state before, or adjoint after, every chunk; state at the end of the scan) from the rows of both axes."""
    plan, (_, _, H, K, V), chunks = call.plan, call.dims, call.chunks
    ad, bd = (keys.xd, values.xd) if adjoint else (keys.yd, values.yd)
    assert ad is not None
    assert bd is not None
    PA, PB = ad.shape[-1], bd.shape[-1]
    BA, BB = min(PA, plan.block_k or 64), min(PB, plan.block_d or 64)
    tiles = cdiv(K, BA) * cdiv(V, BB)
    segments = call.segments(tiles)
    arguments = {
        "ad": ad, "bd": bd, "chunk_decay_a": keys.chunk_decay, "chunk_decay_b": values.chunk_decay,
        "NT": chunks.per_sequence, **segments.arguments,
    }  # fmt: skip
    # Three stages: 0.155 ms on (8, 2048, 16, 128, 128), 0.187 with two.
    common: dict[str, Any] = {
        "H": H, "DA": K, "DB": V, "PA": PA, "PB": PB, "BA": BA, "BB": BB, "ADJOINT": adjoint, "STAGES": plan.num_stages or 3,
        "num_warps": plan.num_warps or 4, "shrink_stages": call.shrinks_stages, "kernel": key_value_scan.scan_states,
        "grid": (tiles * segments.count * H,),
    }  # fmt: skip
    ends = Ends()
    if segments.split:
        nothing = dict.fromkeys(("begin", "ends", "end_decay_a", "end_decay_b"))
        final, decay_a, decay_b = _ends_shapes(call, segments)
        out = {"states": None, "final": final, "segment_decay_a": decay_a, "segment_decay_b": decay_b}
        found = triton_call(arguments={**arguments, **nothing}, out_shape=out, **common)
        ends = Ends(found["final"], found["segment_decay_a"], found["segment_decay_b"])
    before = {"begin": begin, "ends": ends.states, "end_decay_a": ends.key_decays, "end_decay_b": ends.value_decays}
    out = {
        "states": shape((chunks.count, H, 2, K, V), plan.operand), "final": shape((call.sequences, H, K, V), np.float32),
        "segment_decay_a": None, "segment_decay_b": None,
    }  # fmt: skip
    found = triton_call(arguments={**arguments, **before}, out_shape=out, **common)
    return found["states"], found["final"]
