"""The launches of calls with gates per key and per value channel, bfloat16, chunks of 64 rows: `_key`, `_both`, `_side`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.callib import cdiv, shared_memory_limit, triton_call
from ejkernel.kernels._triton.recurrent import _both, _mild, _pairs
from ejkernel.kernels._triton.recurrent._launch import Call, absent, heads, shape, sides
from ejkernel.kernels._triton.recurrent._launch_key import (
    Prepared,
    Strength,
    exact_side,
    one_side,
    pairs_shapes,
    prepared,
    prepared_keys,
)
from ejkernel.kernels._triton.recurrent._plan import Array, Segments, gate_pieces, tile

OUTPUTS_SHARED = 202 << 10  # bytes that a program of `_both.outputs` takes


def fits(call: Call) -> bool:
    """Whether these kernels can do a call: gates per key and per value channel, bfloat16 products, chunks of 64 rows."""
    both = call.get("gk") is not None and call.get("gv") is not None
    return both and call.plan.operand == jnp.bfloat16 and call.plan.C == 64


def forward(call: Call, keep: bool) -> tuple[Array, Array, dict[str, Any]]:
    """(output, final state, what the gradient starts from if kept)."""
    B, T, H, K, V = call.dims
    keys = prepared_keys(call, keep, halves=2)
    key, value = sides(call, None)
    out = {"dx": shape((B, T, H, V), call.plan.output)}
    # `outputs` holds a state of up to 128 key channels, in two parts of at least 16, which K must reach into both.
    if 32 <= tile(K, 512) <= 128 and shared_memory_limit(_both.outputs) >= OUTPUTS_SHARED:
        strength = _strength_of_values(call)
        output, final, starts = _outputs(call, keys, strength.mild, keep)
        pairs = _arranged(call, keys, strength.mild, 1.0)
        (output,) = exact_side(call, value, key, strength, keys, pairs, starts, None, out, [output])
    else:
        values = _prepared_values(call, None, totals=True)
        strength = values.strength
        starts, final = _walk(call, (keys.yd, values.yd), (keys.tot, values.tot), call.get("initial_state"), adjoint=False)
        pairs = _arranged(call, keys, strength.mild, 1.0)
        (output,) = one_side(call, value, key, strength, keys, pairs, starts, None, out)
    # With the strength of the values: found again by other sums, a chunk at the limit might be mild where its pairs are needed.
    kept = {"states": starts, "arranged": pairs[0], "near": pairs[1], "value_strength": strength, **keys._asdict()}
    return output, final, kept if keep else {}


def backward(
    call: Call, do: Array, keys: Prepared, strength: Strength, arranged: tuple[Array, ...], starts: Array,
    dfinal: Array | None, key_out: dict[str, jax.ShapeDtypeStruct], value_out: dict[str, jax.ShapeDtypeStruct],
) -> tuple[list[Array], list[Array], Array]:  # fmt: skip
    """([dq, dk, dgk], [dv, dgv], gradient of the initial state), from what `forward` has kept; strength: of the values."""
    values = _prepared_values(call, do, totals=False)
    assert keys.xd is not None
    assert values.xd is not None
    ends, dinitial = _walk(call, (keys.xd, values.xd), (keys.tot, values.tot), dfinal, adjoint=True)
    key, value = sides(call, do)
    pairs = _arranged(call, values, keys.strength.mild, call.plan.scale)
    of_keys = one_side(call, key, value, keys.strength, values, pairs, starts, ends, key_out)
    of_values = one_side(call, value, key, strength, keys, arranged, starts, ends, value_out)
    return of_keys, of_values, dinitial


def _prepared_values(call: Call, do: Array | None, *, totals: bool) -> Prepared:
    return prepared(call, do, call.arrays["value"], call.arrays["gv"], 1.0, g=None, g_gamma=None, totals=totals, halves=2)


def _strength_of_values(call: Call) -> Strength:
    """Of the value side only what its gate alone tells."""
    plan, (_, T, H, _, V), slots = call.plan, call.dims, call.slots
    gv = call.arrays["gv"]
    found = triton_call(
        gv, slots.table, T, slots.per_sequence, kernel=_mild.mild_chunks, grid=(slots.count, H), H=H, HG=heads(gv), D=V,
        BD=tile(V, 128), SIGN=plan.sign, num_warps=2, num_stages=1,
        out_shape=[shape((slots.count, H), np.int32), shape((slots.count, H, 8, V), np.float32)],
    )  # fmt: skip
    return Strength(*found)


def _outputs(call: Call, keys: Prepared, mild: Array, keep: bool) -> tuple[Array, Array, Array]:
    """(output where the values are mild, state at the end, states where they are not, or everywhere if kept)."""
    plan, (B, T, H, K, V), slots = call.plan, call.dims, call.slots
    v, gv = call.arrays["value"], call.arrays["gv"]
    BV = plan.block_d or (128 if V > 64 else 64)  # 0.28 against 0.34 ms with 128 channels: q and k are read once
    segments = Segments.of(slots, call.sequences, call.sequences * H * cdiv(V, BV))
    sizes = (slots.table, segments.table, T, slots.per_sequence, segments.per_sequence, segments.chunks)
    inputs = (keys.xd, keys.yd, keys.tot, keys.pairs, keys.rest, v, gv, mild)
    common: dict[str, Any] = {
        "H": H, "HV": heads(v), "HG": heads(gv), "K": K, "KP": keys.tot.shape[2], "V": V, "BV": BV, "SIGN": plan.sign,
        "EVEN": slots.even, "KEEP": keep, "PIECES": gate_pieces(plan, gv), "STAGES": plan.num_stages or 2,
        "num_warps": plan.num_warps or (8 if BV > 64 else 4), "fewer_stages": plan.num_stages is None, "kernel": _both.outputs,
        "grid": (cdiv(V, BV) * segments.count * H,),
    }  # fmt: skip
    ends: list[Array | None] = [None, None, None]
    if segments.split:
        out_shape = _ends_shapes(call, segments)
        ends = triton_call(*inputs, None, None, None, None, *sizes, o=None, states=None, out_shape=out_shape, **common)
    out = [shape((B, T, H, V), plan.output), shape((call.sequences, H, K, V), np.float32)]
    return triton_call(
        *inputs, call.get("initial_state"), *ends, *sizes, **absent(("decay", "decay_v")),
        out_shape=[*out, shape((slots.count, H, 2, K, V), plan.operand)], **common,
    )  # fmt: skip


def _ends_shapes(call: Call, segments: Segments) -> list[jax.ShapeDtypeStruct]:
    """Of each segment's end and of its decays per key and per value channel."""
    G, (_, _, H, K, V) = segments.count, call.dims
    return [shape((G, H, K, V), np.float32), shape((G, H, K), np.float32), shape((G, H, V), np.float32)]


def _arranged(call: Call, own: Prepared, mild: Array, scale: float) -> tuple[Array, ...]:
    """`scale` times the pairs of a side as `_side` needs them for the other one, in those chunks of it that are not `mild`."""
    plan, (_, T, H, _, _), slots = call.plan, call.dims, call.slots
    return tuple(
        triton_call(
            own.pairs, own.rest, slots.table, mild, scale, T, slots.per_sequence, kernel=_pairs.pairs_of_gated,
            grid=(slots.count * H,), H=H, SIGN=plan.sign, num_warps=4, out_shape=pairs_shapes(call, 2),
        )
    )  # fmt: skip


def _walk(
    call: Call, rows: tuple[Array, Array], tot: tuple[Array, Array], begin: Array | None, *, adjoint: bool
) -> tuple[Array, Array]:
    """(state at every slot, state at the end)."""
    plan, (_, _, H, K, V), slots = call.plan, call.dims, call.slots
    PA, PB = rows[0].shape[-1], rows[1].shape[-1]
    BA, BB = min(PA, plan.block_k or 64), min(PB, plan.block_d or 64)
    tiles = cdiv(K, BA) * cdiv(V, BB)
    segments = Segments.of(slots, call.sequences, call.sequences * H * tiles)
    sizes = (segments.table, slots.per_sequence, segments.per_sequence, segments.chunks)
    # Three stages: 0.155 ms on (8, 2048, 16, 128, 128), 0.187 with two.
    common: dict[str, Any] = {
        "H": H, "DA": K, "DB": V, "PA": PA, "PB": PB, "BA": BA, "BB": BB, "ADJOINT": adjoint, "STAGES": plan.num_stages or 3,
        "num_warps": plan.num_warps or 4, "kernel": _both.walk_prepared, "grid": (tiles * segments.count * H,),
        "fewer_stages": plan.num_stages is None,
    }  # fmt: skip
    ends: list[Array | None] = [None, None, None]
    if segments.split:
        out_shape = _ends_shapes(call, segments)
        ends = triton_call(*rows, *tot, None, None, None, None, *sizes, states=None, out_shape=out_shape, **common)
    states, final = triton_call(
        *rows, *tot, begin, *ends, *sizes, **absent(("decay_a", "decay_b")),
        out_shape=[shape((slots.count, H, 2, K, V), plan.operand), shape((call.sequences, H, K, V), np.float32)], **common,
    )  # fmt: skip
    return states, final
