"""The launches of `_key` and `_side`: gates per key channel alone, bfloat16, chunks of 64 rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.callib import cdiv, is_interpreted, triton_call
from ejkernel.kernels._triton.recurrent import _key, _pairs, _side
from ejkernel.kernels._triton.recurrent._launch import Call, Side, absent, fits_registers, heads, shape, sides
from ejkernel.kernels._triton.recurrent._plan import Array, Segments, tile


def fits(call: Call) -> bool:
    """Whether `_key` can do a call: a gate per key channel alone, bfloat16 products, chunks of 64 rows."""
    only_key = call.get("gk") is not None and call.get("gv") is None
    return only_key and call.plan.operand == jnp.bfloat16 and call.plan.C == 64 and fits_registers(call, call.dims[3])


class Prepared(NamedTuple):
    """What `_key.prepare` leaves of a side with a gate: x and y are q and k, or do and v."""

    pairs: Array | None  # [slots, H, 64, 64]
    xd: Array | None  # [slots, H, 64, P]: x times the decays up to each row
    yd: Array  # [slots, H, 64, P]: y times the decays after each row
    tot: Array  # [slots, H, P]: a slot's decay
    totals: Array | None  # [slots, H, 8, D]: that of each block of 8 rows


def prepared(
    call: Call, x: Array | None, y: Array, gate: Array, scale: float, *, g: Array | None, g_gamma: Array | None, totals: bool
) -> Prepared:
    """One side of a call; without x only what the state and the side's own rows need."""
    plan, (_, T, H, _, _), slots = call.plan, call.dims, call.slots
    C, D, count = plan.C, y.shape[3], slots.count
    P = max(32, tile(D, 512))
    rows, by_head = shape((count, H, C, P), plan.operand), (count, H)
    out = {"A": shape((*by_head, C, C), plan.operand), "qd": rows} if x is not None else {}
    out |= {"kd": rows, "tot": shape((*by_head, P), np.float32)}
    if totals:
        out["totals"] = shape((*by_head, 8, D), np.float32)
    results = triton_call(
        x, y, gate, g, g_gamma, slots.table, scale, T, slots.per_sequence, kernel=_key.prepare, grid=(count, H), H=H,
        HK=heads(y), HG=heads(gate), HGS=heads(g), K=D, KP=P, BK=min(P, 128), SIGN=plan.sign, EVEN=slots.even,
        APPROXIMATE=not is_interpreted(_key.prepare), num_warps=4, num_stages=1, maxnreg=160 if P == 64 else None,
        out_shape=list(out.values()), **absent(n for n in ("A", "qd", "totals") if n not in out),
    )  # fmt: skip
    found = dict(zip(out, results, strict=True))
    return Prepared(found.get("A"), found.get("qd"), found["kd"], found["tot"], found.get("totals"))


def prepared_keys(call: Call, totals: bool) -> Prepared:
    """The key side, with the head's own decay."""
    q, k, gk = (call.arrays[name] for name in ("query", "key", "gk"))
    return prepared(call, q, k, gk, call.plan.scale, g=call.get("g"), g_gamma=call.get("g_gamma"), totals=totals)


def forward(call: Call, keep: bool) -> tuple[Array, Array, dict[str, Any]]:
    """(output, final state, what the gradient starts from if kept: states before every slot, pairs, decays of blocks)."""
    side = prepared_keys(call, keep)
    v, begin = call.arrays["value"], call.get("initial_state")
    o, final, *states = _walk_prepared(call, side.xd, side.yd, side.tot, side.pairs, v, begin, keep=keep)
    if not keep:
        return o, final, {}
    return o, final, {"states": states[0], "pairs": side.pairs, "totals": side.totals, "qd": side.xd, "tot": side.tot}


def adjoint(call: Call, do: Array, qd: Array, tot: Array, dfinal: Array | None) -> tuple[Array, Array]:
    """(adjoint after every slot, gradient of the initial state) from what `forward` has kept."""
    final, states = _walk_prepared(call, None, qd, tot, None, do, dfinal, keep=True)
    return states, final


def _walk_prepared(
    call: Call, qd: Array | None, kd: Array, tot: Array, A: Array | None, v: Array, begin: Array | None, *, keep: bool
) -> list[Array]:
    """`_key.outputs`: [output if qd is given, else the walk is adjoint; state at the end; states if kept]."""
    plan, (B, T, H, K, V), slots = call.plan, call.dims, call.slots
    adjoint = qd is None
    BV = plan.block_d or tile(V, 64)
    tiles = cdiv(V, BV)
    KP = kd.shape[3]
    segments = Segments.of(slots, call.sequences, call.sequences * H * tiles)
    sizes = (slots.table, segments.table, T, slots.per_sequence, segments.per_sequence, segments.chunks)
    common: dict[str, Any] = {
        "H": H, "SIGN": plan.sign, "EVEN": slots.even, "K": K, "KP": KP, "HV": heads(v), "V": V, "BV": BV, "ADJOINT": adjoint,
        "STAGES": plan.num_stages or (3 if KP <= 128 else 1), "num_warps": plan.num_warps or 4, "kernel": _key.outputs,
        "grid": (tiles * segments.count, H),
    }  # fmt: skip
    ends = decay = None
    if segments.split:
        G = segments.count
        ends, decay = triton_call(
            qd, kd, tot, A, v, None, None, None, *sizes, o=None, states=None,
            out_shape=[shape((G, H, K, V), np.float32), shape((G, H, K), np.float32)], **common,
        )  # fmt: skip
    out = {} if adjoint else {"o": shape((B, T, H, V), plan.output)}
    out["final"] = shape((call.sequences, H, K, V), np.float32)
    if keep:
        out["states"] = shape((slots.count, H, K, V), plan.operand)
    return triton_call(
        qd, kd, tot, A, v, begin, ends, decay, *sizes, decay=None, out_shape=list(out.values()),
        **absent(n for n in ("o", "states") if n not in out), **common,
    )  # fmt: skip


def backward(
    call: Call, do: Array, totals: Array, starts: Array, ends: Array, out: dict[str, jax.ShapeDtypeStruct]
) -> list[Array]:
    """dq, dk and the gradient of the key gate where `fits`; totals: from `forward`."""
    plan, (_, T, H, _, V), slots = call.plan, call.dims, call.slots
    v = call.arrays["value"]
    M, near = triton_call(
        do, v, slots.table, plan.scale, T, slots.per_sequence, kernel=_pairs.pairs_of_plain, grid=(slots.count, H), H=H, HX=H,
        HY=heads(v), D=V, BD=tile(V, 128), SIGN=plan.sign, EVEN=slots.even, PREC=plan.precision, num_warps=4, num_stages=1,
        out_shape=pairs_shapes(call),
    )  # fmt: skip
    key, value = sides(call, do)
    return one_side(call, key, value, (M, near), totals, (do, v), None, starts, ends, out)


def pairs_shapes(call: Call) -> list[jax.ShapeDtypeStruct]:
    """Of opposite pairs as `_side` reads them: in tile order, and inside blocks of 8 rows."""
    n, H = call.slots.count, call.dims[2]
    return [shape((n, H, 64, 64), call.plan.operand), shape((n, H, 8, 8, 8), np.float32)]


def one_side(
    call: Call, own: Side, other: Side, pairs: tuple[Array, Array], totals: Array, opposite: tuple[Array, Array | None],
    tot2: Array | None, starts: Array, ends: Array | None, out: dict[str, jax.ShapeDtypeStruct],
) -> list[Array]:  # fmt: skip
    """Runs `_side.side` for those of dx, dy, dg that `out` names; without dy it is a forward pass.

    Args:
        pairs, totals: of the opposite and of the own side.
        opposite: its x and y, as they are or, with tot2, as `prepared` has left them.
    """
    plan, (_, T, H, _, _), slots = call.plan, call.dims, call.slots
    D, D2 = own.y.shape[3], other.y.shape[3]
    by_head = (call.get("g"), call.get("g_gamma")) if own.key else (None, None)
    BD = (plan.block_k if own.key else plan.block_d) or 32
    scale = plan.scale if own.key else 1.0  # the key side's x is scaled by `prepared`
    x2, y2 = opposite
    return triton_call(
        own.x if "dy" in out else None, own.y, own.gate, *by_head, *pairs, totals, x2, y2, tot2, starts, ends, slots.table,
        scale, T, slots.per_sequence,
        kernel=_side.side, grid=(cdiv(D, BD) * slots.count, H), H=H, HX=H, HY=heads(own.y), HG=heads(own.gate),
        HGS=heads(by_head[0]), HX2=H, HY2=heads(other.y), D=D, D2=D2, P2=0 if tot2 is None else tot2.shape[2], BD=BD,
        B2=tile(D2, 128), STRIDE=own.stride, STRIDE2=other.stride, SIGN=plan.sign, EVEN=slots.even, PREC=plan.precision,
        APPROXIMATE=not is_interpreted(_side.side), STAGES=1 if D2 <= 128 else 2, STATES_FIRST=D2 > 128, num_warps=8,
        num_stages=1, maxnreg=128, out_shape=[out[n] for n in ("dx", "dy", "dg") if n in out],
        **absent(n for n in ("dx", "dy", "dg") if n not in out),
    )  # fmt: skip
