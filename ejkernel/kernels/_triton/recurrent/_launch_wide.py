"""The launches of calls without a gate per channel whose states have 129 to 256 key channels: bfloat16, chunks of 64 rows."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel.callib import triton_call
from ejkernel.kernels._triton.recurrent import _scalar
from ejkernel.kernels._triton.recurrent._launch import Call, heads, per_head_dtype, shape
from ejkernel.kernels._triton.recurrent._launch_key import walk_outputs
from ejkernel.kernels._triton.recurrent._plan import Array


def fits(call: Call) -> bool:
    """Whether a call is one of these."""
    return call.gated_by_head and call.plan.operand == jnp.bfloat16 and call.plan.C == 64 and 128 < call.dims[3] <= 256


def forward(call: Call, keep: bool) -> tuple[Array, Array, dict[str, Any]]:
    """(output, final state, what the gradient starts from if kept)."""
    pairs, qd, kd, tot = _prepared(call)
    v, begin = call.arrays["value"], call.get("initial_state")
    o, final, *states = walk_outputs(call, qd, kd, tot, (pairs, None), v, begin, call.plan.output, adjoint=False, keep=keep)
    return o, final, {"states": states[0], "pairs": pairs, "qd": qd, "kd": kd, "tot": tot, **call.kept_sums} if keep else {}


def adjoint(call: Call, do: Array, saved: dict[str, Array], dfinal: Array | None) -> tuple[Array, Array, Array]:
    """(dv per query head, adjoint after every slot, gradient of the initial state) from what `forward` has kept."""
    qd, kd, tot, pairs = (saved[name] for name in ("qd", "kd", "tot", "pairs"))
    dtype = per_head_dtype(call, call.arrays["value"])
    dv, final, states = walk_outputs(call, kd, qd, tot, (pairs, None), do, dfinal, dtype, adjoint=True, keep=True)
    return dv, states, final


def _prepared(call: Call) -> list[Array]:
    """The key side as the walk reads it: pairs, q and k times their decays, a slot's decay."""
    plan, (_, T, H, K, _), slots = call.plan, call.dims, call.slots
    q, k = call.arrays["query"], call.arrays["key"]
    n, KP = slots.count, 256
    rows = shape((n, H, 64, KP), plan.operand)
    return triton_call(
        q, k, *call.head_gates, slots.table, plan.scale, T, slots.per_sequence, kernel=_scalar.prepare,
        grid=(n * H,), HK=heads(k), K=K, KP=KP, BK=128, EXACT=plan.exact, num_warps=4, num_stages=1,
        out_shape=[shape((n, H, 64, 64), plan.operand), rows, rows, shape((n, H, KP), np.float32)], **call.constants(),
    )  # fmt: skip
