"""Each kernel's launch: its grid, its tiles, its constants. Those of kernels for bfloat16 and chunks of 64 rows alone are in
`_launch_key`, `_launch_both` and `_launch_wide`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import triton.language as tl

from ejkernel.callib import cdiv, triton_call
from ejkernel.kernels._triton.recurrent import _decays, _gated, _scalar, _step, _walk
from ejkernel.kernels._triton.recurrent._plan import Array, Plan, Segments, Slots, gate_pieces, tile

OPERANDS = {"bfloat16": tl.bfloat16, "float32": tl.float32}


def shape(dims: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def absent(names: Iterable[str]) -> dict[str, Any]:
    """Parameters that a kernel is compiled without."""
    return dict.fromkeys(names)


def heads(x: Array | None) -> int:
    """Heads of an array [B, T, heads, ...]; 1 when it is not given (any number that divides will do)."""
    return 1 if x is None else x.shape[2]


@dataclasses.dataclass(frozen=True)
class Call:
    """One call's arrays and their cut into slots."""

    plan: Plan
    arrays: dict[str, Array]
    cu_seqlens: Array | None
    slots: Slots
    sums: Array | None = None  # of `_decays.running_sums`, where a forward pass has made them already

    @classmethod
    def of(cls, plan: Plan, arrays: dict[str, Array], cu_seqlens: Array | None, sums: Array | None = None) -> Call:
        B, T = arrays["query"].shape[:2]
        return cls(plan, arrays, cu_seqlens, Slots.of(plan, B, T, cu_seqlens), sums)

    def get(self, name: str) -> Array | None:
        return self.arrays.get(name)

    @property
    def dims(self) -> tuple[int, int, int, int, int]:
        return (*self.arrays["query"].shape, self.arrays["value"].shape[3])  # type: ignore[return-value]

    @property
    def sequences(self) -> int:
        return self.dims[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def gated_by_head(self) -> bool:
        """Whether nothing but g of rank 3 and g_gamma decays."""
        return self.get("gk") is None and self.get("gv") is None

    @functools.cached_property
    def head_gates(self) -> tuple[Array | None, Array | None]:
        """(gs, gamma) as kernels take them: g and g_gamma, or the running sums of both where `head_decays` reads those."""
        g, g_gamma = self.get("g"), self.get("g_gamma")
        if g is None or self.plan.exact or not self.gated_by_head:
            return g, g_gamma
        if self.sums is not None:
            return self.sums, None
        (_, T, H, _, _), plan, slots = self.dims, self.plan, self.slots
        BH = 16
        made = triton_call(
            g, g_gamma, slots.table, T, slots.per_sequence, kernel=_decays.running_sums, grid=(cdiv(H, BH) * slots.count,), H=H,
            HGS=heads(g), C=plan.C, BH=BH, SIGN=plan.sign, num_warps=4, out_shape=shape((slots.count, H, plan.C), np.float32),
        )  # fmt: skip
        return made, None

    @property
    def kept_sums(self) -> dict[str, Array]:
        """The running sums, if any, for the backward pass."""
        gs, _ = self.head_gates
        return {} if gs is None or gs is self.get("g") else {"sums": gs}

    def pieces(self, *names: str) -> int:
        return gate_pieces(self.plan, *(self.get(name) for name in names))

    def constants(self) -> dict[str, Any]:
        """What every chunked kernel is compiled for. A configuration's own number of stages is used as given."""
        plan = self.plan
        return {
            "H": self.dims[2], "HGS": heads(self.get("g")), "C": plan.C, "SIGN": plan.sign, "EVEN": self.slots.even,
            "DT": OPERANDS[plan.operand.name], "PREC": plan.precision, "fewer_stages": plan.num_stages is None,
        }  # fmt: skip


def _walk_call(
    call: Call, a: Array, b: Array, adjoint: bool, segments: Segments | None
) -> tuple[Segments, dict[str, Any], tuple[Any, ...]]:
    """(segments, constants, sizes) of a launch of `_walk.walk`."""
    plan, (_, T, H, K, V), slots = call.plan, call.dims, call.slots
    wide = 64 if plan.operand == jnp.bfloat16 else 32
    by_head = call.gated_by_head and plan.operand == jnp.bfloat16  # which takes few registers
    BA, BB = plan.block_k or tile(K, 2 * wide if by_head else wide), plan.block_d or tile(V, wide)
    tiles = cdiv(K, BA) * cdiv(V, BB)
    if segments is None:
        segments = Segments.of(slots, call.sequences, call.sequences * H * tiles)
    gk, gv = call.get("gk"), call.get("gv")
    constants: dict[str, Any] = dict(
        call.constants(), HA=heads(a), HB=heads(b), HGA=heads(gk), HGB=heads(gv), DA=K, DB=V, BA=BA, BB=BB, ADJOINT=adjoint,
        PIECES=call.pieces("gk", "gv", "g", "g_gamma"), EXACT=plan.exact, STAGES=plan.num_stages or 3,
        num_warps=plan.num_warps or 4, kernel=_walk.walk, grid=(tiles * segments.count * H,),
    )  # fmt: skip
    scale = plan.scale if adjoint else 1.0
    sizes = (slots.table, segments.table, scale, T, slots.per_sequence, segments.per_sequence, segments.chunks)
    return segments, constants, sizes


def segment_ends(
    call: Call, a: Array, b: Array, segments: Segments, *, adjoint: bool = False
) -> tuple[Array | None, Array | None, Array | None]:
    """What each segment leaves when it starts from zero: (state [G, H, K, V], decay [G, H, K], decay [G, H, V] with gv)."""
    if not segments.split:
        return None, None, None
    _, constants, sizes = _walk_call(call, a, b, adjoint, segments)
    _, _, H, K, V = call.dims
    G = segments.count
    out = [shape((G, H, K, V), np.float32), shape((G, H, K), np.float32)]
    missing: dict[str, Any] = {"states": None}
    if call.get("gv") is None:
        missing["decay_b"] = None
    else:
        out.append(shape((G, H, V), np.float32))
    gates = (call.get("gk"), call.get("gv"), *call.head_gates)
    results = triton_call(a, b, *gates, None, None, None, None, *sizes, out_shape=out, **missing, **constants)
    return tuple(results) if len(results) == 3 else (*results, None)


def walk(call: Call, a: Array, b: Array, begin: Array | None, *, adjoint: bool = False) -> tuple[Array, Array]:
    """(state at every slot, state at the end) from (key, value), or adjoint from (query, the output's adjoint)."""
    segments, constants, sizes = _walk_call(call, a, b, adjoint, None)
    ends = segment_ends(call, a, b, segments, adjoint=adjoint)
    _, _, H, K, V = call.dims
    gates = (call.get("gk"), call.get("gv"), *call.head_gates)
    return triton_call(
        a, b, *gates, begin, *ends, *sizes, decay_a=None, decay_b=None, **constants,
        out_shape=(shape((call.slots.count, H, K, V), call.plan.operand), shape((call.sequences, H, K, V), np.float32)),
    )  # fmt: skip


def fits_registers(call: Call, channels: int) -> bool:
    """Whether a state with this many rows can be walked whole, a tile of columns at a time."""
    return tile(channels, 512) <= (256 if call.plan.operand == jnp.bfloat16 else 64)


def one_pass(call: Call, channels: int) -> bool:
    """Whether a scalar gate's outputs are made from q, k and v while the state is walked.

    A state of more than 128 rows leaves room for few columns, and q k^T would be made anew for each of them: 0.65 to 0.82 on
    (8, 4096, 4, 256, 512), against 0.31 ms by `_launch_wide`, and 0.58 by `walk` and `_scalar.outputs`, which the rest takes.
    """
    return fits_registers(call, channels) and channels <= 128


def scalar_pass(
    call: Call, q: Array, k: Array, v: Array, begin: Array | None, segments: Segments, ends: tuple[Any, ...], output: Any, *,
    adjoint: bool = False, transposed: bool = False, final: bool = False, keep: bool = False,
) -> list[Array]:  # fmt: skip
    """`_scalar.forward` on (q, k, v) or on arrays in their roles: [output, final state?, states?]."""
    plan, (B, T, H, _, _), slots = call.plan, call.dims, call.slots
    K, V = k.shape[3], v.shape[3]
    BK = tile(K, 512)
    BV = scalar_value_tile(call, K, V)
    out = {"o": shape((B, T, H, V), output)}
    if final:
        out["final"] = shape((call.sequences, H, K, V), np.float32)
    if keep:
        out["states"] = shape((slots.count, H, K, V), plan.operand)
    return triton_call(
        q, k, v, *call.head_gates, begin, *ends[:2], slots.table, segments.table, plan.scale, T, slots.per_sequence,
        segments.per_sequence, segments.chunks, kernel=_scalar.forward, grid=(cdiv(V, BV) * segments.count * H,), HQ=heads(q),
        HK=heads(k), HV=heads(v), K=K, V=V, BK=BK, BV=BV, STRIDE_K=1 if transposed else V, STRIDE_V=K if transposed else 1,
        DECAYS=V if transposed else K, ADJOINT=adjoint, EXACT=plan.exact, STAGES=plan.num_stages or scalar_stages(call, BK),
        num_warps=plan.num_warps or 4, out_shape=list(out.values()),
        **absent(name for name in ("final", "states") if name not in out), **call.constants(),
    )  # fmt: skip


def scalar_stages(call: Call, BK: int) -> int:
    """Loads in flight: with a gate and 128 or more key channels a third stage would leave one program to a multiprocessor."""
    gated = call.get("g") is not None or call.get("g_gamma") is not None
    return 3 if BK <= 64 or (BK <= 128 and not gated) else 2


def scalar_value_tile(call: Call, K: int, V: int) -> int:
    """Value channels per program: 64, or 32 for small states without a gate, which keeps the device busier at little cost."""
    if call.plan.block_d:
        return call.plan.block_d
    gated = call.get("g") is not None or call.get("g_gamma") is not None
    return tile(V, 32 if max(K, V) <= 64 and not gated else 64)


def scalar_segments(call: Call, K: int, V: int) -> Segments:
    programs = call.sequences * call.dims[2] * cdiv(V, scalar_value_tile(call, K, V))
    return Segments.of(call.slots, call.sequences, programs)


def scalar_forward(call: Call, keep: bool) -> tuple[Array, Array, Array | None]:
    """(output, final state, states before every slot if kept) of a call without gates per channel."""
    plan, (B, T, H, K, V) = call.plan, call.dims
    q, k, v = (call.arrays[name] for name in ("query", "key", "value"))
    begin, slots = call.get("initial_state"), call.slots
    if one_pass(call, K):
        segments = scalar_segments(call, K, V)
        ends = segment_ends(call, k, v, segments)
        o, last, *states = scalar_pass(call, q, k, v, begin, segments, ends, plan.output, final=True, keep=keep)
        return o, last, states[0] if keep else None
    starts, last = walk(call, k, v, begin)
    BK, BV = plan.block_k or tile(K, 64), plan.block_d or tile(V, 64)
    o = triton_call(
        q, k, v, *call.head_gates, starts, slots.table, plan.scale, T, slots.per_sequence,
        kernel=_scalar.outputs, grid=(cdiv(V, BV) * slots.count * H,), HK=heads(k), K=K, V=V, BK=BK, BV=BV, EXACT=plan.exact,
        num_warps=plan.num_warps or 4, num_stages=plan.num_stages or 2, out_shape=shape((B, T, H, V), plan.output),
        **call.constants(),
    )  # fmt: skip
    return o, last, starts if keep else None


def scalar_backward_by_passes(call: Call, do: Array, dfinal: Array | None) -> tuple[Array, Array, Array, Array]:
    """(dq, dk, dv per query head, gradient of the initial state) where no gradient of a gate is asked for.

    Each is the forward recurrence with the arrays in other roles: dq runs forward, dk and dv backward in time. Nothing but
    the inputs is kept between forward and backward.
    """
    _, _, _, K, V = call.dims
    q, k, v = (call.arrays[name] for name in ("query", "key", "value"))
    begin = call.get("initial_state")
    over_k, over_v = scalar_segments(call, K, V), scalar_segments(call, V, K)
    back = segment_ends(call, q, do, over_k, adjoint=True)
    back_v = back if over_k.chunks == over_v.chunks else segment_ends(call, q, do, over_v, adjoint=True)
    (dq,) = scalar_pass(call, do, v, k, begin, over_v, segment_ends(call, k, v, over_v), q.dtype, transposed=True)
    (dk,) = scalar_pass(call, v, do, q, dfinal, over_v, back_v, per_head_dtype(call, k), adjoint=True, transposed=True)
    dv, dinitial = scalar_pass(call, k, q, do, dfinal, over_k, back, per_head_dtype(call, v), adjoint=True, final=True)
    return dq, dk, dv, dinitial


def scalar_backward_of_value(call: Call, do: Array, dfinal: Array | None) -> tuple[Array, Array, Array]:
    """(dv per query head, adjoint after every slot, gradient of the initial state) by one pass back in time."""
    _, _, _, K, V = call.dims
    q, k = (call.arrays[name] for name in ("query", "key"))
    segments = scalar_segments(call, K, V)
    back = segment_ends(call, q, do, segments, adjoint=True)
    dtype = per_head_dtype(call, call.arrays["value"])
    dv, dinitial, ends = scalar_pass(call, k, q, do, dfinal, segments, back, dtype, adjoint=True, final=True, keep=True)
    return dv, ends, dinitial


def scalar_backward(
    call: Call, do: Array, starts: Array, ends: Array, *, of_value: bool
) -> tuple[Array, Array, Array | None, Array | None]:
    """Gradients per query head: dq, dk [B, T, H, K], dv [B, T, H, V] if asked for, and of the log decays [B, T, H] (None
    without gates)."""
    plan, (B, T, H, K, V) = call.plan, call.dims
    q, k, v = (call.arrays[name] for name in ("query", "key", "value"))
    (gs, gamma), slots = call.head_gates, call.slots
    gated = gs is not None or gamma is not None
    wide = 64 if plan.operand == jnp.bfloat16 else 32
    BK, BV = plan.block_k or tile(K, wide), plan.block_d or tile(V, wide)
    # So three programs share a multiprocessor: 0.203 against 0.229 ms with 64 channels, but 0.35 against 0.25 with 128.
    one_tile = plan.operand == jnp.bfloat16 and plan.C == 64 and BK >= K and BV >= V and not plan.num_warps
    out = {"dq": shape(q.shape, q.dtype), "dk": shape((B, T, H, K), per_head_dtype(call, k))}
    if of_value:
        out["dv"] = shape((B, T, H, V), per_head_dtype(call, v))
    if gated:
        out["dg"] = shape((B, T, H), np.float32)
    results = triton_call(
        q, k, v, gs, gamma, do, starts, ends, slots.table, plan.scale, T, slots.per_sequence, kernel=_scalar.backward,
        grid=(slots.count * H,), HK=heads(k), K=K, V=V, BK=BK, BV=BV, EXACT=plan.exact, maxnreg=168 if one_tile else None,
        num_warps=plan.num_warps or 4, num_stages=plan.num_stages or 3, out_shape=list(out.values()),
        **absent(n for n in ("dv", "dg") if n not in out), **call.constants(),
    )  # fmt: skip
    found = dict(zip(out, results, strict=True))
    return found["dq"], found["dk"], found.get("dv"), found.get("dg")


def per_head_dtype(call: Call, x: Array) -> Any:
    """What a kernel writes a gradient per query head in: the array's own dtype, or float32 when a group is summed after."""
    return x.dtype if heads(x) == call.dims[2] else np.float32


@dataclasses.dataclass(frozen=True)
class Side:
    """One side of a call: the key or the value channels."""

    key: bool
    x: Array | None
    y: Array
    gate: Array | None
    scale: float  # of its pairs
    fold: bool  # the head's own decay is added to this gate
    stride: int  # of its channel in a state [K, V]


def sides(call: Call, do: Array | None) -> tuple[Side, Side]:
    """(key side, value side)."""
    gk, gv = call.get("gk"), call.get("gv")
    q, k, v = (call.arrays[name] for name in ("query", "key", "value"))
    return Side(True, q, k, gk, call.plan.scale, True, v.shape[3]), Side(False, do, v, gv, 1.0, gk is None, 1)


def gated_pairs(call: Call, own: Side) -> Array | None:
    """The pairs [slots, H, C, C] of a side with a gate; None for a side without, whose pairs need no kernel."""
    if own.gate is None:
        return None
    plan, (_, T, H, _, _), slots = call.plan, call.dims, call.slots
    D = own.y.shape[3]
    return triton_call(
        own.x, own.y, own.gate, call.get("g"), call.get("g_gamma"), slots.table, own.scale, T,
        slots.per_sequence, kernel=_gated.pairs, grid=(slots.count * H,), HX=heads(own.x), HY=heads(own.y), HG=heads(own.gate),
        FOLD=own.fold, D=D, BD=tile(D, 64 if plan.operand == jnp.bfloat16 else 32), LEVELS=plan.C.bit_length() - 1,
        PIECES=call.pieces("gk", "gv", "g", "g_gamma"), num_warps=plan.num_warps or 4, num_stages=1,
        out_shape=shape((slots.count, H, plan.C, plan.C), plan.operand), **call.constants(),
    )  # fmt: skip


def one_side(
    call: Call, own: Side, other: Side, other_pairs: Array | None, starts: Array, ends: Array | None,
    out: dict[str, jax.ShapeDtypeStruct],
) -> list[Array]:  # fmt: skip
    """Runs `_gated.gated_side`, or `plain_side` for a side without a gate, for those of dx, dy, dg that `out` names."""
    plan, (_, T, H, _, _) = call.plan, call.dims
    D, D2, slots = own.y.shape[3], other.y.shape[3], call.slots
    blocks = {True: plan.block_k, False: plan.block_d}
    wide = 64 if plan.operand == jnp.bfloat16 else 32
    own_width = wide if own.gate is not None else 2 * wide
    BD, B2 = blocks[own.key] or tile(D, own_width), blocks[not own.key] or tile(D2, wide)
    tiles = cdiv(D, BD)
    scale_pairs = 1.0 if other_pairs is not None and other.key else plan.scale  # pairs of the key side are scaled already
    x = own.x if "dy" in out else None
    tail = (call.get("g"), call.get("g_gamma"), starts, ends)
    sizes = (slots.table, plan.scale, scale_pairs, T, slots.per_sequence)
    constants: dict[str, Any] = dict(
        call.constants(), HX=heads(own.x), HY=heads(own.y), HX2=heads(other.x), HY2=heads(other.y), HG2=heads(other.gate),
        FOLD2=other.fold, D=D, D2=D2, BD=BD, B2=B2, TILES=tiles, STRIDE=own.stride, STRIDE2=other.stride,
        PIECES=call.pieces("gk", "gv", "g", "g_gamma"), num_warps=plan.num_warps or 4, num_stages=1,
        grid=(cdiv(D, BD * tiles) * slots.count * H,), out_shape=[out[n] for n in ("dx", "dy", "dg") if n in out],
    )  # fmt: skip
    if own.gate is None:
        missing = absent(n for n in ("dx", "dy") if n not in out)
        return triton_call(
            x, own.y, other.x, other.y, other.gate, other_pairs, *tail, *sizes, kernel=_gated.plain_side, **missing, **constants
        )
    parts = 2 if plan.C == 64 else 1  # tiles of 64 rows do not fit the registers
    C = plan.C // parts
    constants |= {"C": C, "PARTS": parts, "grid": (parts * cdiv(D, BD * tiles) * slots.count * H,)}
    return triton_call(
        x, own.y, own.gate, other.x, other.y, other.gate, other_pairs, *tail, *sizes,
        kernel=_gated.gated_side, HG=heads(own.gate), FOLD=own.fold, LEVELS=C.bit_length() - 1, STAGES=plan.num_stages or 1,
        **absent(n for n in ("dx", "dy", "dg") if n not in out), **constants,
    )  # fmt: skip


def step_by_step(call: Call) -> tuple[Array, Array]:
    """(output, final state) by the recurrent schedule."""
    plan, (B, T, H, K, V) = call.plan, call.dims
    q, k, v = (call.arrays[name] for name in ("query", "key", "value"))
    begin, N = call.get("initial_state"), call.sequences
    BK = tile(K, 512)
    BV = plan.block_d or tile(V, max(16, 8192 // BK))
    gates = [call.get(name) for name in ("g", "g_gamma", "gk", "gv")]
    return triton_call(
        q, k, v, *gates, begin, call.cu_seqlens, plan.scale, T, kernel=_step.steps, grid=(cdiv(V, BV) * N * H,), H=H,
        HK=heads(k), HGS=heads(gates[0]), HGK=heads(gates[2]), HGV=heads(gates[3]), K=K, V=V, BK=BK, BV=BV, SIGN=plan.sign,
        num_warps=plan.num_warps or 4, out_shape=(shape((B, T, H, V), plan.output), shape((N, H, K, V), np.float32)),
        input_output_aliases={7: 1} if begin is not None and begin.dtype == np.float32 else None,
    )  # fmt: skip
