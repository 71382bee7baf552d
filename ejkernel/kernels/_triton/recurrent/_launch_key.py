"""The launches of `_key` and `_side`: gates per key channel alone, bfloat16, chunks of 64 rows."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.callib import cdiv, is_interpreted, triton_call
from ejkernel.kernels._triton.recurrent import _key, _side
from ejkernel.kernels._triton.recurrent._launch import Call, absent, fits_registers, heads, shape
from ejkernel.kernels._triton.recurrent._plan import Array, Segments, tile


def fits(call: Call) -> bool:
    """Whether `_key` can do a call: a gate per key channel alone, bfloat16 products, chunks of 64 rows."""
    only_key = call.get("gk") is not None and call.get("gv") is None
    return only_key and call.plan.operand == jnp.bfloat16 and call.plan.C == 64 and fits_registers(call, call.dims[3])


def forward(call: Call, keep: bool) -> tuple[Array, Array, dict[str, Array]]:
    """(output, final state, what the gradient starts from if kept: states before every slot, pairs, decays of blocks)."""
    plan, (_, T, H, K, _), slots = call.plan, call.dims, call.slots
    q, k, v = (call.arrays[name] for name in ("query", "key", "value"))
    gk, begin, C, count = call.arrays["gk"], call.get("initial_state"), plan.C, slots.count
    KP = max(32, tile(K, 512))
    common: dict[str, Any] = {"H": H, "SIGN": plan.sign, "EVEN": slots.even, "K": K, "KP": KP}
    A, qd, kd, tot, *totals = triton_call(
        q, k, gk, call.get("g"), call.get("g_gamma"), slots.table, plan.scale, T, slots.per_sequence, kernel=_key.prepare,
        grid=(count, H), HK=heads(k), HG=heads(gk), HGS=heads(call.get("g")), BK=min(KP, 128),
        APPROXIMATE=not is_interpreted(_key.prepare), num_warps=4, num_stages=1, maxnreg=160 if KP == 64 else None,
        out_shape=[
            shape((count, H, C, C), plan.operand),
            shape((count, H, C, KP), plan.operand),
            shape((count, H, C, KP), plan.operand),
            shape((count, H, KP), np.float32),
            *([shape((count, H, 8, K), np.float32)] if keep else []),
        ],
        **absent([] if keep else ["totals"]), **common,
    )  # fmt: skip
    o, final, *states = _walk_prepared(call, qd, kd, tot, A, v, begin, keep=keep)
    return o, final, {"states": states[0], "pairs": A, "totals": totals[0], "qd": qd, "tot": tot} if keep else {}


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
    plan, (_, T, H, K, V), slots = call.plan, call.dims, call.slots
    q, k, v, gk = (call.arrays[name] for name in ("query", "key", "value", "gk"))
    common: dict[str, Any] = {"H": H, "SIGN": plan.sign, "EVEN": slots.even, "PREC": plan.precision, "num_stages": 1}
    M, near = triton_call(
        do, v, slots.table, plan.scale, T, slots.per_sequence, kernel=_side.pairs_of_plain, grid=(slots.count, H), HX=H,
        HY=heads(v), D=V, BD=tile(V, 128), num_warps=4,
        out_shape=[shape((slots.count, H, 64, 64), plan.operand), shape((slots.count, H, 8, 8, 8), np.float32)], **common,
    )  # fmt: skip
    BD = plan.block_k or 32
    return triton_call(
        q, k, gk, call.get("g"), call.get("g_gamma"), M, near, totals, do, v, starts, ends, slots.table, plan.scale, T,
        slots.per_sequence,
        kernel=_side.side, grid=(cdiv(K, BD) * slots.count, H), HX=H, HY=heads(k), HG=heads(gk), HGS=heads(call.get("g")),
        HX2=H, HY2=heads(v), D=K, D2=V, BD=BD, B2=tile(V, 128), STRIDE=V, STRIDE2=1,
        APPROXIMATE=not is_interpreted(_side.side), STAGES=1 if V <= 128 else 2,
        STATES_FIRST=V > 128, num_warps=8, maxnreg=128,
        out_shape=[out[n] for n in ("dx", "dy", "dg")], **common,
    )  # fmt: skip
