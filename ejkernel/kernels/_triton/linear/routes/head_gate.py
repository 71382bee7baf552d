"""One gate per head (g of rank 3, g_gamma), or none: four routes by how wide the state is and which gradients are asked for."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel.callib import cdiv, triton_call
from ejkernel.kernels._linear.config import RecurrenceConfig
from ejkernel.kernels._triton._gluon import HAS_GLUON
from ejkernel.kernels._triton.linear._call import Call, heads, shape, states_in_chunks
from ejkernel.kernels._triton.linear._chunks import MULTIPROCESSORS, Array, Segments
from ejkernel.kernels._triton.linear._plan import Plan, tile
from ejkernel.kernels._triton.linear.kernels import head_gate
from ejkernel.kernels._triton.linear.routes.route import Changes, Gradients, Route, Saved
from ejkernel.kernels._triton.linear.routes.scans import (
    Ends,
    kept_segments,
    scan_rows,
    scan_states,
    segment_ends,
    starts_of_segments,
    wide_tiles,
    with_agreed_segments,
)

if HAS_GLUON:
    from ejkernel.kernels._triton.linear.kernels import head_gate_backward_warpgroups, head_gate_warpgroups

RING = 160 << 10  # bytes of shared memory for chunks that are copied ahead: three of 128 channels
# By value channels, what `head_gate_backward_by_warpgroups` copies ahead: chunks, and tiles of 64 of their key channels.
AHEAD = {64: (3, 5), 128: (2, 3)}
# Segments of a dense sequence from which their starts are made once, by a launch of its own. A segment that begins by reading
# the ends of all before it waits for one after the other. At (1, 16384, 16, 128, 128), eight segments, `g_gamma` takes 0.367 ms
# with its gradient, for 0.434. Packed sequences have two or three: 0.214 for 0.200 forward.
MANY_SEGMENTS = 4
CHANGES: Changes = (
    {"block_d": 32}, {"num_warps": 8}, {"num_warps": 8, "block_d": 32}, {"num_stages": 2}, {"num_stages": 2, "block_d": 32},
    {"block_q": 32}, {"block_q": 32, "block_d": 32},
)  # fmt: skip
WIDE_CHANGES: Changes = (  # longer chunks leave fewer states, wider tiles read q and k less often
    {"block_q": 128, "num_warps": 8}, {"num_warps": 8, "block_d": 128},
)  # fmt: skip


def state_in_one_tile(plan: Plan, channels: int) -> bool:
    """Whether outputs are made from q, k and v during the scan: with all key channels of a state in one program.

    A state of more than 128 rows leaves room for few columns, and q k^T would be made anew for each of them: 0.65 to 0.82 on
    (8, 4096, 4, 256, 512), against 0.31 ms by `WideHeadGate`, and 0.58 by `StoredHeadGate`.
    """
    return channels <= 128 and tile(channels, 512) <= (128 if plan.bfloat16 else 64)


@dataclasses.dataclass(frozen=True)
class HeadGate(Route):
    """A scan reads every input once and makes the outputs; the gradient scans back for dv, then does dq, dk chunk by chunk."""

    title = "head gate"
    covers = "g [B, T, H], g_gamma or no gate; K up to 128 (64 unless bfloat16)"

    @classmethod
    def covering(cls, plan: Plan) -> Route | None:
        return cls(plan) if plan.per_head and state_in_one_tile(plan, plan.K) else None

    def differentiated(self, *, constant_decay: bool) -> Route:
        return HeadGateByPasses(self.plan) if self._no_gate_gradient(constant_decay) else self

    def _no_gate_gradient(self, constant_decay: bool) -> bool:
        return "g" not in self.plan.gates and not constant_decay and state_in_one_tile(self.plan, self.plan.V)

    def forward(self, call: Call, keep: bool) -> tuple[Array, Array, Saved]:
        found, _ = self._scanned(call, keep)
        return found["o"], found["final"], {"states": found["states"], **call.kept_log_decays} if keep else {}

    def _scanned(self, call: Call, keep: bool) -> tuple[dict[str, Array], Ends]:
        _, _, _, K, V = call.dims
        q, k, v = call.query_key_value
        segments = _segments(call, K, V)
        ends = segment_ends(call, k, v, segments)
        begin = call.get("initial_state")
        return _scan(call, q, k, v, begin, segments, ends, call.plan.output, final=True, keep=keep), ends

    def recomputed(self, call: Call) -> Saved:
        _, k, v = call.query_key_value
        return {"states": scan_states(call, k, v, call.get("initial_state"))[0]}

    def backward(self, call: Call, saved: Saved, do: Array, dfinal: Array | None) -> Gradients:
        _, _, _, K, V = call.dims
        q, k, v = call.query_key_value
        segments = _segments(call, K, V)
        back = segment_ends(call, q, do, segments, adjoint=True)
        dtype = call.per_head_dtype(v)
        found = _scan(call, k, q, do, dfinal, segments, back, dtype, adjoint=True, final=True, keep=True)
        of_rows = _chunk_gradients(call, do, saved["states"], found["states"], of_value=False)
        return Gradients(of_rows["dq"], of_rows["dk"], found["o"], found["final"], of_rows.get("dg"))

    def changes(self) -> Changes:
        return CHANGES

    def refuses(self, cfg: RecurrenceConfig) -> str | None:
        if cfg.block_k is None or self.plan.gates or not self._no_gate_gradient(False):
            return None
        return (
            f"block_k must be None for a call without gates whose state is one tile of key channels (K = {self.plan.K}): "
            f"nothing would read it; got {cfg.block_k}"
        )


@dataclasses.dataclass(frozen=True)
class HeadGateByPasses(HeadGate):
    """`HeadGate` where no gradient of a gate is asked for: the gradient is three such scans with the arrays in other roles.

    dq scans forward, dk and dv back in time. Nothing but the inputs and, where a sequence has several segments, what each of
    them leaves is kept between forward and backward.
    """

    title = "head gate, gradient by three scans"
    covers = "the gradient of head gate where no gate's own is asked for and V, too, is up to 128 (64)"

    @classmethod
    def covering(cls, plan: Plan) -> Route | None:
        return None  # only where a gradient is asked for: see `HeadGate.differentiated`

    def agreed(self, arrays: dict[str, Any], cu_seqlens: Array | None) -> Route:
        if not self._keeps_ends(packed=cu_seqlens is not None):
            return self
        tiles = _tiles(self.plan, self.plan.K, self.plan.V)
        return dataclasses.replace(self, plan=with_agreed_segments(self.plan, arrays, cu_seqlens, tiles))

    def _keeps_ends(self, *, packed: bool) -> bool:
        """Whether dq goes along the forward pass's segments, and so can take their ends.

        Packed calls keep nothing: `vmap` folds them then.
        """
        K, V = self.plan.K, self.plan.V
        return not packed and _tiles(self.plan, K, V) == _tiles(self.plan, V, K)

    def forward(self, call: Call, keep: bool) -> tuple[Array, Array, Saved]:
        found, ends = self._scanned(call, keep=False)
        if not keep or not self._keeps_ends(packed=call.cu_seqlens is not None):
            return found["o"], found["final"], {}
        if ends.states is None:  # what is kept has one structure, however `vmap` makes the batch fill the device
            none = jnp.zeros((call.sequences, call.dims[2], 1, 1), np.float32)
            ends = Ends(none, none[..., 0])
        return found["o"], found["final"], {"ends": ends._asdict()}

    def recomputed(self, call: Call) -> Saved:
        return {}

    def backward(self, call: Call, saved: Saved, do: Array, dfinal: Array | None) -> Gradients:
        _, _, _, K, V = call.dims
        q, k, v = call.query_key_value
        kept = saved.get("ends")
        over_k, over_v = _segments(call, K, V), _segments(call, V, K)
        if kept is not None:
            over_k = over_v = kept_segments(call, kept["states"].shape[0])
        back = segment_ends(call, q, do, over_k, adjoint=True)
        back_v = back if over_k.length == over_v.length else segment_ends(call, q, do, over_v, adjoint=True)
        ends = Ends(**kept) if kept and over_v.split else segment_ends(call, k, v, over_v)
        of_key, of_value = call.per_head_dtype(k), call.per_head_dtype(v)
        dq = _scan(call, do, v, k, call.get("initial_state"), over_v, ends, q.dtype, transposed=True)["o"]
        dk = _scan(call, v, do, q, dfinal, over_v, back_v, of_key, adjoint=True, transposed=True)["o"]
        found = _scan(call, k, q, do, dfinal, over_k, back, of_value, adjoint=True, final=True)
        return Gradients(dq, dk, found["o"], found["final"])


@dataclasses.dataclass(frozen=True)
class WideHeadGate(Route):
    """Rows and intra-chunk scores are made chunk by chunk, and a scan of them makes the outputs, with tiles for wide states."""

    wide_tiles: bool
    title = "head gate, wide keys"
    covers = "the same with 129 to 256 key channels, bfloat16, chunks of 64"

    @classmethod
    def covering(cls, plan: Plan) -> Route | None:
        if not (plan.per_head and plan.bfloat16 and plan.C == 64 and 128 < plan.K <= 256):
            return None
        return cls(plan, wide_tiles(plan, 256))

    @property
    def name(self) -> str:
        return self.title + (", wide tiles" if self.wide_tiles else "")

    def forward(self, call: Call, keep: bool) -> tuple[Array, Array, Saved]:
        # The gradient scans back along q times its decays; without one they may be put on the outputs instead.
        rows = self._rows(call, with_queries=keep or not self.wide_tiles)
        v, begin = call.arrays["value"], call.get("initial_state")
        scanned = scan_rows(
            call, {**rows, "A_low": None}, v, begin, call.plan.output, wide=self.wide_tiles, adjoint=False, keep=keep
        )
        saved = {"states": scanned.states, "rows": rows, **call.kept_log_decays} if keep else {}
        return scanned.output, scanned.final, saved

    def backward(self, call: Call, saved: Saved, do: Array, dfinal: Array | None) -> Gradients:
        rows = saved["rows"]
        rows = {**rows, "qd": rows["kd"], "kd": rows["qd"], "A_low": None}
        dtype = call.per_head_dtype(call.arrays["value"])
        scanned = scan_rows(call, rows, do, dfinal, dtype, wide=self.wide_tiles, adjoint=True, keep=True)
        assert scanned.states is not None
        of_rows = _chunk_gradients(call, do, saved["states"], scanned.states, of_value=False)
        return Gradients(of_rows["dq"], of_rows["dk"], scanned.output, scanned.final, of_rows.get("dg"))

    def _rows(self, call: Call, *, with_queries: bool) -> dict[str, Array]:
        """k and, if asked for, q times their decays, intra-chunk scores and chunk decays, as the scan reads them."""
        plan, (_, _, H, K, _), chunks = call.plan, call.dims, call.chunks
        q, k, _ = call.query_key_value
        n, KP = chunks.count, 256
        rows = shape((n, H, 64, KP), plan.operand)
        out = {
            "A": shape((n, H, 64, 64), plan.operand), "qd": rows if with_queries else None, "kd": rows,
            "q_decay": None if with_queries else shape((n, H, 64), np.float32), "chunk_decay": shape((n, H, KP), np.float32),
        }  # fmt: skip
        found = triton_call(
            arguments={"q": q, "k": k, **call.head_gates, "scale": plan.scale, **chunks.arguments}, out_shape=out,
            kernel=head_gate.head_gate_rows, grid=(n * H,), HK=heads(k), K=K, KP=KP, BK=128, EXACT=plan.exact, num_warps=4,
            num_stages=1, shrink_stages=call.shrinks_stages, **call.constants(),
        )  # fmt: skip
        return found if with_queries else {**found, "qd": q}

    def changes(self) -> Changes:
        return (*CHANGES, *WIDE_CHANGES)


@dataclasses.dataclass(frozen=True)
class StoredHeadGate(Route):
    """A scan stores the state before every chunk; outputs and gradients are made from them chunk by chunk."""

    title = "head gate, stored states"
    covers = "the same with more key channels than that, other dtypes and chunks"

    @classmethod
    def covering(cls, plan: Plan) -> Route | None:
        return cls(plan) if plan.per_head else None

    def forward(self, call: Call, keep: bool) -> tuple[Array, Array, Saved]:
        plan, (B, T, H, K, V), chunks = call.plan, call.dims, call.chunks
        q, k, v = call.query_key_value
        states, final = scan_states(call, k, v, call.get("initial_state"))
        BK, BV = plan.block_k or tile(K, 64), plan.block_d or tile(V, 64)
        found = triton_call(
            arguments={"q": q, "k": k, "v": v, **call.head_gates, "starts": states, "scale": plan.scale, **chunks.arguments},
            out_shape={"o": shape((B, T, H, V), plan.output)}, kernel=head_gate.head_gate_outputs,
            grid=(cdiv(V, BV) * chunks.count * H,), HK=heads(k), K=K, V=V, BK=BK, BV=BV, EXACT=plan.exact,
            num_warps=plan.num_warps or 4, num_stages=plan.num_stages or 2, shrink_stages=call.shrinks_stages,
            **call.constants(),
        )  # fmt: skip
        return found["o"], final, {"states": states, **call.kept_log_decays} if keep else {}

    def stored_bytes(self, call: Call) -> int:
        return states_in_chunks(call)

    def recomputed(self, call: Call) -> Saved:
        _, k, v = call.query_key_value
        return {"states": scan_states(call, k, v, call.get("initial_state"))[0]}

    def backward(self, call: Call, saved: Saved, do: Array, dfinal: Array | None) -> Gradients:
        ends, dinitial = scan_states(call, call.arrays["query"], do, dfinal, adjoint=True)
        of_rows = _chunk_gradients(call, do, saved["states"], ends, of_value=True)
        return Gradients(of_rows["dq"], of_rows["dk"], of_rows["dv"], dinitial, of_rows.get("dg"))

    def changes(self) -> Changes:
        return (*CHANGES, *(WIDE_CHANGES if self.plan.K > 128 else ()))


def _value_tile(plan: Plan, K: int, V: int) -> int:
    """Value channels per program: 64, or 32 for small states without a gate, which keeps the device busier at little cost."""
    return plan.block_d or tile(V, 32 if max(K, V) <= 64 and not plan.gates else 64)


def _by_warpgroups(plan: Plan, K: int, V: int) -> bool:
    """Whether kernels by warpgroups take states of this size: on Hopper, where no configuration names other tiles."""
    covered = plan.warpgroups and plan.bfloat16 and plan.C == 64 and {K, V} <= {64, 128}
    return covered and not plan.named_scan_tiles


def _tiles(plan: Plan, K: int, V: int) -> int:
    """Programs of the scan of one segment and head. One by warpgroups fills a multiprocessor, as two others do."""
    return 2 if _by_warpgroups(plan, K, V) else cdiv(V, _value_tile(plan, K, V))


def _segments(call: Call, K: int, V: int) -> Segments:
    return call.segments(_tiles(call.plan, K, V))


def _scan(
    call: Call, q: Array, k: Array, v: Array, begin: Array | None, segments: Segments, ends: Ends, output: Any, *,
    adjoint: bool = False, transposed: bool = False, final: bool = False, keep: bool = False,
) -> dict[str, Array]:  # fmt: skip
    """`head_gate_scan` on (q, k, v) or on arrays in their roles: o, and final and states if asked for."""
    plan, (B, T, H, _, _), chunks = call.plan, call.dims, call.chunks
    K, V = k.shape[3], v.shape[3]
    warpgroups = _by_warpgroups(plan, K, V) and all(x.dtype == jnp.bfloat16 for x in (q, k, v))
    if warpgroups and ends.states is not None and segments.table is None and segments.per_sequence >= MANY_SEGMENTS:
        begin, ends = None, starts_of_segments(call, begin, ends, segments, adjoint=adjoint)
    out = {
        "o": shape((B, T, H, V), output),
        "final": shape((call.sequences, H, K, V), np.float32) if final else None,
        "states": shape((chunks.count, H, K, V), plan.operand) if keep else None,
    }
    arguments = {
        "q": q, "k": k, "v": v, **call.head_gates, "begin": begin, "ends": ends.states, "end_decay": ends.key_decays,
        "scale": plan.scale, **chunks.arguments, **segments.arguments,
    }  # fmt: skip
    constants: dict[str, Any] = {
        "HQ": heads(q), "HK": heads(k), "HV": heads(v), "K": K, "V": V, "STRIDE_K": 1 if transposed else V,
        "STRIDE_V": K if transposed else 1, "DECAYS": V if transposed else K, "ADJOINT": adjoint,
    }  # fmt: skip
    if warpgroups:
        return triton_call(
            arguments=arguments, out_shape=out, kernel=head_gate_warpgroups.head_gate_scan_by_warpgroups,
            grid=(segments.count * H,), H=H, C=plan.C, SIGN=plan.sign, EVEN=chunks.even,
            STAGES=RING // (plan.C * (2 * K + V) * 2), SCORES=2, COPY_REGISTERS=40, SCORE_REGISTERS=144, VALUE_REGISTERS=160,
            **constants,
        )  # fmt: skip
    BK, BV = tile(K, 512), _value_tile(plan, K, V)
    # With a gate and 128 or more key channels a third stage would leave one program to a multiprocessor.
    stages = plan.num_stages or (3 if BK <= 64 or (BK <= 128 and not plan.gates) else 2)
    return triton_call(
        arguments=arguments, out_shape=out, kernel=head_gate.head_gate_scan, grid=(cdiv(V, BV) * segments.count * H,),
        BK=BK, BV=BV, EXACT=plan.exact, STAGES=stages, num_warps=plan.num_warps or 4, shrink_stages=call.shrinks_stages,
        **constants, **call.constants(),
    )  # fmt: skip


def _chunk_gradients(call: Call, do: Array, starts: Array, ends: Array, *, of_value: bool) -> dict[str, Array]:
    """Per query head: dq, dk [B, T, H, K], dv [B, T, H, V] if asked for, and dg [B, T, H] of the log decays if there are."""
    plan, (B, T, H, K, V), chunks = call.plan, call.dims, call.chunks
    q, k, v = call.query_key_value
    gates = call.head_gates
    if (
        _by_warpgroups(plan, K, V) and plan.block_k is None and gates["gs"] is not None and not of_value
        and all(x.dtype == jnp.bfloat16 for x in (q, k, v, do, starts, ends))
    ):  # fmt: skip
        return _chunk_gradients_by_warpgroups(call, do, starts, ends)
    wide = 64 if plan.bfloat16 else 32
    BK, BV = plan.block_k or tile(K, wide), plan.block_d or tile(V, wide)
    # So three programs share a multiprocessor: 0.203 against 0.229 ms with 64 channels, but 0.35 against 0.25 with 128.
    one_tile = plan.bfloat16 and plan.C == 64 and BK >= K and BV >= V and not plan.num_warps
    out = {
        "dq": shape(q.shape, q.dtype),
        "dk": shape((B, T, H, K), call.per_head_dtype(k)),
        "dv": shape((B, T, H, V), call.per_head_dtype(v)) if of_value else None,
        "dg": shape((B, T, H), np.float32) if plan.gates else None,
    }
    arguments = {
        "q": q, "k": k, "v": v, **gates, "do": do, "starts": starts, "ends": ends, "scale": plan.scale, **chunks.arguments,
    }  # fmt: skip
    return triton_call(
        arguments=arguments, out_shape=out, kernel=head_gate.head_gate_backward, grid=(chunks.count * H,), HK=heads(k), K=K,
        V=V, BK=BK, BV=BV, EXACT=plan.exact, maxnreg=168 if one_tile else None, num_warps=plan.num_warps or 4,
        num_stages=plan.num_stages or 3, shrink_stages=call.shrinks_stages, **call.constants(),
    )  # fmt: skip


def _chunk_gradients_by_warpgroups(call: Call, do: Array, starts: Array, ends: Array) -> dict[str, Array]:
    """The same for a call with g, without dv.

    The warpgroup that copies spills addresses where it has few registers: with 128 channels 0.194 ms with 56 of them, 0.167
    with 96.
    """
    plan, (B, T, H, K, V), chunks = call.plan, call.dims, call.chunks
    q, k, v = call.query_key_value
    units = chunks.count * H
    slots, tiles = AHEAD[V]
    out = {"dq": shape(q.shape, q.dtype), "dk": shape((B, T, H, K), call.per_head_dtype(k)), "dg": shape((B, T, H), np.float32)}
    return triton_call(
        arguments={
            "q": q, "k": k, "v": v, "gs": call.head_gates["gs"], "do": do, "starts": starts, "ends": ends, "scale": plan.scale,
            "units": units, **chunks.arguments,
        },
        out_shape=out, kernel=head_gate_backward_warpgroups.head_gate_backward_by_warpgroups,
        grid=(min(units, MULTIPROCESSORS),), H=H, HK=heads(k), K=K, V=V, C=plan.C, SIGN=plan.sign, EVEN=chunks.even,
        SLOTS=slots, TILES=tiles, SCORES=1, COPY_REGISTERS=112, SCORE_REGISTERS=96, KEY_REGISTERS=144,
    )  # fmt: skip
