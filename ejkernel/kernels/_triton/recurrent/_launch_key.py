"""The launches of `_mild`, `_key`, `_pairs` and `_side`, bfloat16, chunks of 64 rows: gates per key channel alone.

The two other kinds of calls that walk prepared rows take parts of it: `_launch_both` and `_launch_wide`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.callib import cdiv, shared_memory_limit, triton_call
from ejkernel.kernels._triton.recurrent import _key, _mild, _pairs, _side, _wide
from ejkernel.kernels._triton.recurrent._launch import Call, Side, absent, fits_registers, heads, per_head_dtype, shape, sides
from ejkernel.kernels._triton.recurrent._plan import PROGRAMS_TO_FILL, Array, Segments, gate_pieces, tile

WIDE_SHARED = 202 << 10  # bytes that a program of `_wide` takes with two chunks in shared memory


def fits(call: Call) -> bool:
    """Whether `_key` can do a call: a gate per key channel alone, bfloat16 products, chunks of 64 rows."""
    only_key = call.get("gk") is not None and call.get("gv") is None
    return only_key and call.plan.operand == jnp.bfloat16 and call.plan.C == 64 and fits_registers(call, call.dims[3])


class Strength(NamedTuple):
    """What the log decays of a gate per channel come to in each slot."""

    mild: Array  # [slots, H]: 1 where `_mild` can do the chunk
    totals: Array | None  # [slots, H, 8, D]: the decay of each block of 8 rows, of the other chunks


class Prepared(NamedTuple):
    """What is made of a side with a gate before its states are walked: x and y are q and k, or do and v."""

    pairs: Array | None  # [slots, H, 64, 64]
    rest: Array | None  # what rounding has left of them, if asked for
    xd: Array | None  # [slots, H, halves, 64, P]: x times the decays up to each row
    yd: Array  # [slots, H, halves, 64, P]: y times the decays after each row
    tot: Array  # [slots, H, P]: a slot's decay
    strength: Strength


def prepared(
    call: Call, x: Array | None, y: Array, gate: Array, scale: float, *, g: Array | None, g_gamma: Array | None, totals: bool,
    rest: bool = False, halves: int = 1,
) -> Prepared:  # fmt: skip
    """One side of a call, its mild chunks first; without x only what the state and the side's own rows need.

    With two halves rows and pairs are bfloat16 and what that leaves of them: what is made of them has only its own rounding.
    """
    plan, (_, T, H, _, _), slots = call.plan, call.dims, call.slots
    D, count = y.shape[3], slots.count
    P = max(32, tile(D, 512))
    rows = shape((count, H, halves, 64, P), plan.operand)
    pairs = shape((count, H, 64, 64), plan.operand)
    everything = {"A": pairs, "rest": pairs, "qd": rows, "kd": rows, "tot": shape((count, H, P), np.float32)}
    missing = absent(("A", "rest", "qd") if x is None else () if rest or halves == 2 else ("rest",))
    out = {name: array for name, array in everything.items() if name not in missing}
    arrays = (x, y, gate, g, g_gamma, slots.table)
    common: dict[str, Any] = {
        "H": H, "HK": heads(y), "HG": heads(gate), "HGS": heads(g), "K": D, "KP": P, "SIGN": plan.sign, "EVEN": slots.even,
        "HALVES": halves, "num_stages": 1, **missing,
    }  # fmt: skip
    BK = 128 if P > 128 else 64  # more at a time when there are several turns: 0.159 against 0.170 ms with 256 channels
    few_registers = BK == 64 and halves == 1  # with two halves 0.209 ms without a limit, 0.228 with it
    *found, mild = triton_call(
        *arrays, scale, T, slots.per_sequence, kernel=_mild.mild_prepare, grid=(count, H), BK=min(P, BK), num_warps=4,
        maxnreg=168 if few_registers else None, PIECES=gate_pieces(plan, gate, g, g_gamma),
        out_shape=[*out.values(), shape((count, H), np.int32)], **common,
    )  # fmt: skip
    group = slots_together(call)
    filled = dict(zip(out, found, strict=True))
    given = (*arrays, mild, scale, T, slots.per_sequence, count, *(filled.get(n) for n in everything))
    places = [len(given) - len(everything) + i for i, n in enumerate(everything) if n in out]
    found = triton_call(
        *given, kernel=_key.prepare, grid=(cdiv(count, group) * H,), BK=min(P, 128 // halves), GROUP=group, num_warps=4,
        maxnreg=160 if P == 64 else None,
        out_shape=[*out.values(), *([shape((count, H, 8, D), np.float32)] if totals else [])],
        input_output_aliases={place: i for i, place in enumerate(places)},
        **absent([] if totals else ["totals"]), **common,
    )  # fmt: skip
    named = dict(zip([*out, "totals"], found, strict=False))
    xd = named.get("qd")
    strength = Strength(mild, named.get("totals"))
    return Prepared(named.get("A"), named.get("rest"), xd, named["kd"], named["tot"], strength)


def slots_together(call: Call, tiles: int = 1) -> int:
    """How many slots a program looks at that skips the mild ones: more are fewer programs to start in vain.

    tiles: how many programs share a slot.
    """
    most = call.slots.count * call.dims[2] * tiles // (4 * PROGRAMS_TO_FILL)
    return 1 << max(0, min(most, 8).bit_length() - 1)


def prepared_keys(call: Call, totals: bool, rest: bool = False, halves: int = 1) -> Prepared:
    """The key side, with the head's own decay."""
    q, k, gk = (call.arrays[name] for name in ("query", "key", "gk"))
    g, g_gamma = call.get("g"), call.get("g_gamma")
    return prepared(call, q, k, gk, call.plan.scale, g=g, g_gamma=g_gamma, totals=totals, rest=rest, halves=halves)


def forward(call: Call, keep: bool) -> tuple[Array, Array, dict[str, Any]]:
    """(output, final state, what the gradient starts from if kept: states before every slot and the key side)."""
    side = prepared_keys(call, keep, rest=keep)
    v, begin = call.arrays["value"], call.get("initial_state")
    o, final, *states = walk_outputs(
        call, side.xd, side.yd, side.tot, (side.pairs, None), v, begin, call.plan.output, adjoint=False, keep=keep
    )
    return o, final, {"states": states[0], **side._asdict()} if keep else {}


def adjoint(call: Call, do: Array, side: Prepared, dfinal: Array | None) -> tuple[Array, Array, Array]:
    """(dv per query head, adjoint after every slot, gradient of the initial state) from what `forward` has kept."""
    dtype = per_head_dtype(call, call.arrays["value"])
    # With the rest of the pairs: nothing else rounds what goes from do to dv inside a chunk.
    pairs = (side.pairs, side.rest)
    dv, final, states = walk_outputs(call, side.yd, side.xd, side.tot, pairs, do, dfinal, dtype, adjoint=True, keep=True)
    return dv, states, final


def walk_outputs(
    call: Call, qd: Array | None, kd: Array | None, tot: Array, pairs: tuple[Array | None, Array | None], v: Array,
    begin: Array | None, output: Any, *, adjoint: bool, keep: bool,
) -> list[Array]:  # fmt: skip
    """`_key.outputs`, or `_wide.wide_outputs`: [output; state at the end; states if kept]. pairs: (A, its rest or None)."""
    plan, (B, T, H, K, V), slots = call.plan, call.dims, call.slots
    KP = tot.shape[2]
    wide = _wide_tiles(call, KP)
    BV = plan.block_d or tile(V, 64)
    segments = Segments.of(slots, call.sequences, call.sequences * H * cdiv(V, 128 if wide else BV))
    sizes = (slots.table, segments.table, T, slots.per_sequence, segments.per_sequence, segments.chunks)
    common: dict[str, Any] = {
        "H": H, "SIGN": plan.sign, "EVEN": slots.even, "K": K, "KP": KP, "HV": heads(v), "V": V, "BV": BV, "ADJOINT": adjoint,
        "STAGES": plan.num_stages or (3 if KP <= 128 else 1), "num_warps": plan.num_warps or 4, "kernel": _key.outputs,
        "grid": (cdiv(V, BV) * segments.count * H,), "fewer_stages": plan.num_stages is None,
    }  # fmt: skip
    ends = decay = None
    if segments.split:
        G = segments.count
        ends, decay = triton_call(
            qd, kd, tot, *pairs, v, None, None, None, *sizes, o=None, states=None,
            out_shape=[shape((G, H, K, V), np.float32), shape((G, H, K), np.float32)], **common,
        )  # fmt: skip
    out = {"o": shape((B, T, H, V), output), "final": shape((call.sequences, H, K, V), np.float32)}
    if keep:
        out["states"] = shape((slots.count, H, K, V), plan.operand)
    if wide:
        grid = (cdiv(V, 128) * segments.count * H,)
        common |= {"kernel": _wide.wide_outputs, "grid": grid, "BV": 128, "STAGES": 2, "num_warps": 8}
        common["ALIKE"] = call.gated_by_head
    else:
        common["decay"] = None
    return triton_call(
        qd, kd, tot, *pairs, v, begin, ends, decay, *sizes, out_shape=list(out.values()), **absent([] if keep else ["states"]),
        **common,
    )  # fmt: skip


def _wide_tiles(call: Call, KP: int) -> bool:
    """Whether `_wide` walks a state of KP key channels: where two chunks fit, and no configuration names tiles of its own."""
    plan, V = call.plan, call.dims[4]
    named = plan.block_d or plan.num_warps or plan.num_stages
    return KP == 256 and V > 64 and not named and shared_memory_limit(_wide.wide_outputs) >= WIDE_SHARED


def backward(
    call: Call, do: Array, own: Prepared, starts: Array, ends: Array, out: dict[str, jax.ShapeDtypeStruct]
) -> list[Array]:
    """dq, dk and the gradient of the key gate where `fits`."""
    plan, (_, T, H, _, V), slots = call.plan, call.dims, call.slots
    v = call.arrays["value"]
    pairs = triton_call(
        do, v, slots.table, own.strength.mild, plan.scale, T, slots.per_sequence, kernel=_pairs.pairs_of_plain,
        grid=(slots.count * H,), H=H, HX=H, HY=heads(v), D=V, BD=tile(V, 128), SIGN=plan.sign, EVEN=slots.even,
        PREC=plan.precision, num_warps=4, num_stages=1, out_shape=pairs_shapes(call, 1),
    )  # fmt: skip
    key, value = sides(call, do)
    return one_side(call, key, value, own.strength, None, tuple(pairs), starts, ends, out)


def pairs_shapes(call: Call, halves: int) -> list[jax.ShapeDtypeStruct]:
    """Of opposite pairs as `_side` reads them: in tile order, and inside blocks of 8 rows."""
    n, H = call.slots.count, call.dims[2]
    return [shape((n, H, halves, 64, 64), call.plan.operand), shape((n, H, 8, 8, 8), np.float32)]


def one_side(
    call: Call, own: Side, other: Side, strength: Strength, opposite: Prepared | None, pairs: tuple[Array, ...], starts: Array,
    ends: Array | None, out: dict[str, jax.ShapeDtypeStruct],
) -> list[Array]:  # fmt: skip
    """Those of dx, dy, dg that `out` names, by `_mild.mild_side` and then `_side.side`; without dy it is a forward pass.

    Args:
        strength: of the own gate.
        opposite: of the other side, None when it has no gate.
        pairs: the opposite ones as `_side` reads them.
    """
    plan, slots = call.plan, call.slots
    inputs, opposite_side, sizes, common = _side_call(call, own, other, opposite, starts, ends, out)
    A2, rest2 = (None, None) if opposite is None else (opposite.pairs, opposite.rest)
    BD = _own_block(call, own) or tile(common["D"], 64)
    found = triton_call(
        *inputs, A2, rest2, *opposite_side, strength.mild, slots.table, *sizes, kernel=_mild.mild_side,
        grid=(cdiv(common["D"], BD) * slots.count * common["H"],), BD=BD, B2=tile(common["D2"], 128), num_warps=4,
        PIECES=gate_pieces(plan, *inputs[2:]), STAGES=1 if opposite is None else 2, fewer_stages=True, **common,
    )  # fmt: skip
    return exact_side(call, own, other, strength, opposite, pairs, starts, ends, out, found)


def exact_side(
    call: Call, own: Side, other: Side, strength: Strength, opposite: Prepared | None, pairs: tuple[Array, ...], starts: Array,
    ends: Array | None, out: dict[str, jax.ShapeDtypeStruct], filled: list[Array],
) -> list[Array]:  # fmt: skip
    """`one_side` for the chunks that are not mild; filled: what `out` names, with the others already in it."""
    slots = call.slots
    inputs, opposite_side, sizes, common = _side_call(call, own, other, opposite, starts, ends, out)
    D, D2 = common["D"], common["D2"]
    BD = _own_block(call, own) or 32
    group = slots_together(call, cdiv(D, BD))
    halves = common["HALVES"] == 2
    found = dict(zip(_side_names(out), filled, strict=True))
    given = (
        *inputs, *pairs, strength.totals, *opposite_side, slots.table, strength.mild, *sizes, slots.count,
        *(found.get(n) for n in ("dx", "dy", "dg")),
    )  # fmt: skip
    places = [len(given) - 3 + i for i, n in enumerate(("dx", "dy", "dg")) if n in found]
    return triton_call(
        *given, kernel=_side.side, grid=(cdiv(D, BD) * cdiv(slots.count, group) * common["H"],), BD=BD, B2=tile(D2, 128),
        GROUP=group, STAGES=1 if D2 <= 128 else 2, STATES_FIRST=D2 > 128 or halves, num_warps=8, fewer_stages=True,
        maxnreg=None if halves else 128,  # with halves 4.9 ms instead of 6.0, and 7.5 with the states last
        input_output_aliases={place: i for i, place in enumerate(places)}, **common,
    )  # fmt: skip


def _own_block(call: Call, own: Side) -> int | None:
    """The tile of own channels that the configuration names."""
    return call.plan.block_k if own.key else call.plan.block_d


def _side_names(out: dict[str, jax.ShapeDtypeStruct]) -> list[str]:
    return [n for n in ("dx", "dy", "dg") if n in out]


def _side_call(
    call: Call, own: Side, other: Side, opposite: Prepared | None, starts: Array, ends: Array | None,
    out: dict[str, jax.ShapeDtypeStruct],
) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...], dict[str, Any]]:  # fmt: skip
    """What `mild_side` and `side` are given alike: (own arrays and gates, opposite ones and states, sizes, constants)."""
    plan, (_, T, H, _, _), slots = call.plan, call.dims, call.slots
    g, g_gamma = (call.get("g"), call.get("g_gamma")) if own.key else (None, None)
    inputs = (own.x if "dy" in out else None, own.y, own.gate, g, g_gamma)
    x2, y2 = (other.x, other.y) if opposite is None else (opposite.xd, opposite.yd)
    tot2 = None if opposite is None else opposite.tot
    opposite_side = (x2, None if ends is None else y2, tot2, starts, ends)
    scale = plan.scale if own.key else 1.0  # the key side's x is scaled by `prepared`
    names = _side_names(out)
    constants = {
        "H": H, "HX": H, "HY": heads(own.y), "HG": heads(own.gate), "HGS": heads(g), "HX2": H, "HY2": heads(other.y),
        "D": own.y.shape[3], "D2": other.y.shape[3], "P2": 0 if tot2 is None else tot2.shape[2], "STRIDE": own.stride,
        "STRIDE2": other.stride, "SIGN": plan.sign, "EVEN": slots.even, "PREC": plan.precision,
        "HALVES": 1 if opposite is None else 2, "num_stages": 1, "out_shape": [out[n] for n in names],
        **absent(n for n in ("dx", "dy", "dg") if n not in out),
    }  # fmt: skip
    return inputs, opposite_side, (scale, T, slots.per_sequence), constants
