"""A forward pass of a long call, one window of time after the other: what a pass stores of states is then that of one window.

Routes that make outputs from stored states need one for every chunk. With a gradient to come they are kept anyway. Without one
they would only take memory, more than the inputs do.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ejkernel.callib import cdiv
from ejkernel.kernels._triton.linear._call import Call
from ejkernel.kernels._triton.linear._chunks import Array
from ejkernel.kernels._triton.linear.routes import Route
from ejkernel.kernels._triton.linear.routes.route import Saved

WITHOUT_TIME = ("g_gamma", "initial_state")


def forward_pass(route: Route, call: Call, keep: bool) -> tuple[Array, Array, Saved]:
    """`route.forward`, in as many windows as the plan's `state_bytes` asks for where nothing is kept."""
    count = 1 if keep or call.cu_seqlens is not None else _windows(route, call)
    if count == 1:
        return route.forward(call, keep)
    plan, T = call.plan, call.dims[1]
    tokens = cdiv(call.chunks.per_sequence, count) * plan.C
    outputs: list[Array] = []
    arrays: dict[str, Any] = dict(call.arrays)
    for done in range(0, T, tokens):
        end = min(T, done + tokens)
        span = slice(T - end, T - done) if plan.reverse else slice(done, end)  # in the order of the recurrence
        part = {name: x if name in WITHOUT_TIME else x[:, span] for name, x in arrays.items()}
        output, arrays["initial_state"], _ = route.forward(Call.of(plan, part, None), False)
        outputs.append(output)
    return jnp.concatenate(outputs[::-1] if plan.reverse else outputs, 1), arrays["initial_state"], {}


def _windows(route: Route, call: Call) -> int:
    """So many that one's states are within the limit, but none shorter than two segments."""
    wanted = cdiv(route.stored_bytes(call), call.plan.state_bytes)
    return max(1, min(wanted, call.chunks.per_sequence // (2 * call.plan.min_segment)))
