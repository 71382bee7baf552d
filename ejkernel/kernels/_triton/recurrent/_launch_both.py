"""The launches of calls with gates per key and per value channel, bfloat16, chunks of 64 rows: `_key`, `_both`, `_side`."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.callib import cdiv, triton_call
from ejkernel.kernels._triton.recurrent import _both, _pairs
from ejkernel.kernels._triton.recurrent._launch import Call, absent, shape, sides
from ejkernel.kernels._triton.recurrent._launch_key import Prepared, one_side, pairs_shapes, prepared, prepared_keys
from ejkernel.kernels._triton.recurrent._plan import Array, Segments


def fits(call: Call) -> bool:
    """Whether these kernels can do a call: gates per key and per value channel, bfloat16 products, chunks of 64 rows."""
    both = call.get("gk") is not None and call.get("gv") is not None
    return both and call.plan.operand == jnp.bfloat16 and call.plan.C == 64


def forward(call: Call, keep: bool) -> tuple[Array, Array, dict[str, Any]]:
    """(output, final state, what the gradient starts from if kept)."""
    B, T, H, _, V = call.dims
    keys = prepared_keys(call, keep)
    values = _prepared_values(call, None)
    starts, final = _walk(call, (keys.yd, values.yd), (keys.tot, values.tot), call.get("initial_state"), adjoint=False)
    pairs = _arranged(call, keys, values, 1.0)
    key, value = sides(call, None)
    out = {"dx": shape((B, T, H, V), call.plan.output)}
    (output,) = one_side(call, value, key, values, keys, pairs, starts, None, out)
    return output, final, {"states": starts, "arranged": pairs[0], "near": pairs[1], **keys._asdict()} if keep else {}


def backward(
    call: Call, do: Array, keys: Prepared, arranged: tuple[Array, ...], starts: Array, dfinal: Array | None,
    key_out: dict[str, jax.ShapeDtypeStruct], value_out: dict[str, jax.ShapeDtypeStruct],
) -> tuple[list[Array], list[Array], Array]:  # fmt: skip
    """([dq, dk, dgk], [dv, dgv], gradient of the initial state), from what `forward` has kept."""
    values = _prepared_values(call, do)
    assert keys.xd is not None
    assert values.xd is not None
    ends, dinitial = _walk(call, (keys.xd, values.xd), (keys.tot, values.tot), dfinal, adjoint=True)
    key, value = sides(call, do)
    of_keys = one_side(call, key, value, keys, values, _arranged(call, values, keys, call.plan.scale), starts, ends, key_out)
    of_values = one_side(call, value, key, values, keys, arranged, starts, ends, value_out)
    return of_keys, of_values, dinitial


def _prepared_values(call: Call, do: Array | None) -> Prepared:
    return prepared(call, do, call.arrays["value"], call.arrays["gv"], 1.0, g=None, g_gamma=None, totals=True)


def _arranged(call: Call, own: Prepared, reader: Prepared, scale: float) -> tuple[Array, ...]:
    """`scale` times the pairs of a side as the other one, the reader, needs them."""
    plan, (_, T, H, _, _), slots = call.plan, call.dims, call.slots
    return tuple(
        triton_call(
            own.pairs, slots.table, reader.mild, scale, T, slots.per_sequence, kernel=_pairs.pairs_of_gated,
            grid=(slots.count * H,), H=H, SIGN=plan.sign, num_warps=4, out_shape=pairs_shapes(call),
        )
    )  # fmt: skip


def _walk(
    call: Call, rows: tuple[Array, Array], tot: tuple[Array, Array], begin: Array | None, *, adjoint: bool
) -> tuple[Array, Array]:
    """(state at every slot, state at the end)."""
    plan, (_, _, H, K, V), slots = call.plan, call.dims, call.slots
    PA, PB = rows[0].shape[3], rows[1].shape[3]
    BA, BB = min(PA, plan.block_k or 64), min(PB, plan.block_d or 64)
    tiles = cdiv(K, BA) * cdiv(V, BB)
    segments = Segments.of(slots, call.sequences, call.sequences * H * tiles)
    sizes = (segments.table, slots.per_sequence, segments.per_sequence, segments.chunks)
    # Two stages: 0.079 ms on (8, 2048, 16, 128, 128), 0.091 with three.
    common: dict[str, Any] = {
        "H": H, "DA": K, "DB": V, "PA": PA, "PB": PB, "BA": BA, "BB": BB, "ADJOINT": adjoint, "STAGES": plan.num_stages or 2,
        "num_warps": plan.num_warps or 4, "kernel": _both.walk_prepared, "grid": (tiles * segments.count * H,),
        "fewer_stages": plan.num_stages is None,
    }  # fmt: skip
    ends: list[Array | None] = [None, None, None]
    if segments.split:
        G = segments.count
        ends = triton_call(
            *rows, *tot, None, None, None, None, *sizes, states=None,
            out_shape=[shape((G, H, K, V), np.float32), shape((G, H, K), np.float32), shape((G, H, V), np.float32)], **common,
        )  # fmt: skip
    states, final = triton_call(
        *rows, *tot, begin, *ends, *sizes, **absent(("decay_a", "decay_b")),
        out_shape=[shape((slots.count, H, K, V), plan.operand), shape((call.sequences, H, K, V), np.float32)], **common,
    )  # fmt: skip
    return states, final
