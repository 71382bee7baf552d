"""The state scan: loops over runs of M chunks each, forward in the order of the recurrence, backward against it.

Chunks of one run are computed side by side, which gives the device M times as many matrix products to spread. Only the state
passes through them in turn, and from run to run in the loop's carry. Outputs and gradients are written into carried arrays.
The forward pass keeps the state before each run when a gradient will be asked; the backward pass recomputes everything else.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel._sizes import as_value
from ejkernel._varying import vary, varying_axes
from ejkernel.kernels._xla.linear import _gated_chunk, _scalar_chunk
from ejkernel.kernels._xla.linear._products import Matmul
from ejkernel.kernels._xla.linear._runs import Run, Runs, put, take

Array = jax.Array
Arrays = Mapping[str, Array]  # query, key, value and those of g, g_gamma, gk, gv, initial_state that are given
UNROLLED_STEPS = 4


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about a call; equal plans compile once."""

    schedule: str
    rows: int  # tokens per chunk
    chunks: int  # chunks per run
    scale: float
    reverse: bool
    state: np.dtype
    operand: np.dtype
    output: np.dtype
    on_cpu: bool
    known_length: bool = False  # whether every loop has as many turns as there could be, so that JAX can reverse it

    @property
    def matmul(self) -> Matmul:
        return Matmul(self.operand, self.state, self.on_cpu)

    def runs(self, tokens: int, cu_seqlens: Array | None) -> Runs:
        if cu_seqlens is None:
            return Runs.dense(self.rows * self.chunks, tokens, self.reverse)
        return Runs.packed(self.rows * self.chunks, tokens, self.reverse, cu_seqlens)

    def split(self, x: Array) -> Array:
        """A run's rows `[B, H, M * C, ...]` by chunks, `[B, H, M, C, ...]`."""
        return x.reshape(*x.shape[:2], self.chunks, self.rows, *x.shape[3:])

    def joined(self, x: Array) -> Array:
        """The rows of a run's chunks `[B, H, M, C, ...]` as `[B, H, M * C, ...]`."""
        return x.reshape(*x.shape[:2], self.chunks * self.rows, *x.shape[4:])


def forward(plan: Plan, arrays: Arrays, cu_seqlens: Array | None, keep_states: bool) -> tuple[Array, Array, Array | None]:
    """(output `[B, T, H, V]`, final state `[N, H, K, V]`, the state before each run `[runs, B, H, K, V]` if kept)."""
    (B, T, H, K), V = arrays["query"].shape, arrays["value"].shape[-1]
    runs = plan.runs(T, cu_seqlens)
    sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    axes = varying_axes(*arrays.values())
    zeros = lambda *shape, dtype=plan.state: vary(jnp.zeros(shape, dtype), axes)
    initial = arrays.get("initial_state")
    initial = zeros(sequences, H, K, V) if initial is None else vary(initial, axes)
    if plan.schedule == "recurrent" and cu_seqlens is None and not keep_states:
        output = zeros(B, T, H, V, dtype=plan.output)
        state, output = _steps(plan, arrays, None, initial, output, (0, as_value(T)))
        return output, state, None
    arrays = _padded(runs, arrays)

    def body(i: Array, carry: Any) -> Any:
        state, output, finals, states = carry
        run = runs.at(i)
        if run.packed is not None:
            state = jnp.where(run.packed.first, take(initial, run.packed.sequence, 1, axis=0), state)
        if states is not None:
            states = put(states, state[None], i, axis=0)
        if plan.schedule == "recurrent":
            state, output = _steps(plan, arrays, run, state, output, run.span)
        else:
            state, rows = _chunk_forward(plan, arrays, runs, run, state)
            output = runs.write(output, run, rows * plan.scale)
        if run.packed is not None:  # each run of a sequence writes; its last one stays
            finals = put(finals, state, run.packed.sequence, axis=0)
        return state, output, finals, states

    packed = cu_seqlens is not None
    start = (
        zeros(B, H, K, V) if packed else initial,
        zeros(B, runs.tokens, H, V, dtype=plan.output),
        initial if packed else None,
        zeros(runs.capacity, B, H, K, V) if keep_states else None,
    )
    if plan.known_length and packed:
        end = lax.fori_loop(0, runs.capacity, functools.partial(_if_used, runs, body), start)
    else:
        end = lax.fori_loop(0, runs.count, body, start)
    state, output, finals, states = end
    return output[:, :T], finals if packed else state, states


def backward(
    plan: Plan, arrays: Arrays, cu_seqlens: Array | None, states: Array, doutput: Array, dfinal: Array, wanted: Iterable[str]
) -> dict[str, Array]:
    """The gradients of the `wanted` arrays from the cotangents of output and final state."""
    given = dict(arrays)
    (B, T, H, K), V = given["query"].shape, given["value"].shape[-1]
    runs = plan.runs(T, cu_seqlens)
    axes = varying_axes(*given.values(), doutput, dfinal, states)
    arrays, doutput = _padded(runs, given), runs.padded(doutput)
    time_grads = [name for name in wanted if name not in ("g_gamma", "initial_state")]
    empty = {name: vary(jnp.zeros_like(arrays[name]), axes) for name in time_grads}
    dgamma = vary(jnp.zeros(given["g_gamma"].shape, plan.state), axes) if "g_gamma" in wanted else None
    dfinal = vary(dfinal.astype(plan.state), axes)

    def body(step: Array, carry: Any) -> Any:
        dstate, dinitials, grads, dgamma = carry
        i = runs.count - 1 - step
        run = runs.at(i)
        if run.packed is not None:
            dstate = jnp.where(run.packed.last, take(dfinal, run.packed.sequence, 1, axis=0), dstate)
        state = take(states, i, 1, axis=0)[0]
        drows = runs.read(doutput, run, H, plan.state) * plan.scale
        dstate, found = _chunk_backward(plan, arrays, runs, run, state, dstate, drows)
        grads = {name: runs.write(grads[name], run, found[name]) for name in grads}
        if dgamma is not None:
            per_row = found["g_gamma"] if run.mine is None else jnp.where(run.mine[None, None], found["g_gamma"], 0)
            total = jnp.sum(per_row, -1)  # [B, H]
            at = 0 if run.packed is None else run.packed.sequence
            dgamma = put(dgamma, take(dgamma, at, B, axis=0) + total, at, axis=0)
        if run.packed is not None:  # against the recurrence a sequence's first run comes last, and stays
            dinitials = put(dinitials, dstate, run.packed.sequence, axis=0)
        return dstate, dinitials, grads, dgamma

    packed = cu_seqlens is not None
    start = (
        vary(jnp.zeros((B, H, K, V), plan.state), axes) if packed else dfinal,
        dfinal if packed else None,  # an empty sequence hands its final state's cotangent to its initial state
        empty,
        dgamma,
    )
    dstate, dinitials, grads, dgamma = lax.fori_loop(0, runs.count, body, start)
    grads = {name: grad[:, :T] for name, grad in grads.items()}
    if dgamma is not None:
        grads["g_gamma"] = dgamma.astype(given["g_gamma"].dtype)
    if "initial_state" in wanted:
        grads["initial_state"] = dinitials if packed else dstate
    return grads


def _if_used(runs: Runs, body: Any, i: Array, carry: Any) -> Any:
    """`body`, for runs that are used."""
    return lax.cond(i < runs.count, functools.partial(body, i), lambda carry: carry, carry)


def _padded(runs: Runs, arrays: Arrays) -> dict[str, Array]:
    return {name: x if name in ("g_gamma", "initial_state") else runs.padded(x) for name, x in arrays.items()}


def _decays(plan: Plan, arrays: Arrays, runs: Runs, run: Run, heads: int) -> tuple[Array | None, Array | None, Array | None]:
    """The run's decays, per row `[B, H, C]`, per key channel `[B, H, C, K]`, per value channel `[B, H, C, V]`.

    A decay per row goes with the key channels, else with the value channels, when there are such gates.
    """
    per_row = None
    if "g" in arrays:
        per_row = jnp.exp(runs.read(arrays["g"], run, heads, plan.state))
    if "g_gamma" in arrays:
        gamma = arrays["g_gamma"].astype(plan.state)  # [N, H]
        gamma = gamma if run.packed is None else take(gamma, run.packed.sequence, 1, axis=0)
        constant = jnp.broadcast_to(jnp.exp(gamma)[..., None], (*gamma.shape, runs.rows))
        constant = constant if run.mine is None else jnp.where(run.mine[None, None], constant, 1)
        per_row = constant if per_row is None else per_row * constant
    a, b = (jnp.exp(runs.read(arrays[n], run, heads, plan.state)) if n in arrays else None for n in ("gk", "gv"))
    if per_row is not None and a is not None:
        return None, a * per_row[..., None], b
    if per_row is not None and b is not None:
        return None, None, b * per_row[..., None]
    return per_row, a, b


def _chunk_forward(plan: Plan, arrays: Arrays, runs: Runs, run: Run, state: Array) -> tuple[Array, Array]:
    heads = arrays["query"].shape[2]
    q, k, v = (plan.split(runs.read(arrays[name], run, heads, plan.state)) for name in ("query", "key", "value"))
    w, a, b = (plan.split(x) if x is not None else None for x in _decays(plan, arrays, runs, run, heads))
    if a is None and b is None:
        state, output = _scalar_chunk.forward(plan.matmul, state, q, k, v, w)
    else:
        state, output = _gated_chunk.forward(plan.matmul, state, q, k, v, a, b)
    return state, plan.joined(output)


def _chunk_backward(
    plan: Plan, arrays: Arrays, runs: Runs, run: Run, state: Array, dstate: Array, drows: Array
) -> tuple[Array, dict[str, Array]]:
    """(adjoint of the state before the run, gradients by name, each `[B, H, C, ...]`)."""
    heads = arrays["query"].shape[2]
    q, k, v = (plan.split(runs.read(arrays[name], run, heads, plan.state)) for name in ("query", "key", "value"))
    w, a, b = (plan.split(x) if x is not None else None for x in _decays(plan, arrays, runs, run, heads))
    drows = plan.split(drows)
    if a is None and b is None:
        dstate, scalar = _scalar_chunk.backward(plan.matmul, state, dstate, q, k, v, w, drows)
        found = {"query": scalar.dq, "key": scalar.dk, "value": scalar.dv}
        per_row = scalar.dw
    else:
        dstate, gated = _gated_chunk.backward(plan.matmul, state, dstate, q, k, v, a, b, drows)
        found = {"query": gated.dq, "key": gated.dk, "value": gated.dv}
        found |= {name: grad for name, grad in (("gk", gated.da), ("gv", gated.db)) if grad is not None}
        per_channel = gated.db if gated.da is None else gated.da
        per_row = jnp.sum(per_channel, -1)  # type: ignore[arg-type]  # one of the two gates is given
    if per_row is not None:
        found |= {"g": per_row, "g_gamma": per_row}
    return dstate, {name: plan.joined(grad) for name, grad in found.items()}


def _steps(
    plan: Plan, arrays: Arrays, run: Run | None, state: Array, output: Array, span: tuple[Array | int, Array | int]
) -> tuple[Array, Array]:
    """The recurrence token by token over `span`: (state after it, output with its rows written)."""
    heads = arrays["query"].shape[2]

    def token(name: str, t: Array | int) -> Array:
        row = take(arrays[name], t, 1)[:, 0].astype(plan.state)  # [B, h, ...]
        return row if row.shape[1] == heads else jnp.repeat(row, heads // row.shape[1], axis=1)

    def step(i: Array | int, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        state, output = carry
        t = span[1] - 1 - i if plan.reverse else span[0] + i
        if "g" in arrays:
            state = state * jnp.exp(token("g", t))[..., None, None]
        if "g_gamma" in arrays:
            state = state * constant
        if "gk" in arrays:
            state = state * jnp.exp(token("gk", t))[..., None]
        if "gv" in arrays:
            state = state * jnp.exp(token("gv", t))[..., None, :]
        state = state + token("key", t)[..., None] * token("value", t)[..., None, :]
        row = plan.matmul.nn(token("query", t)[..., None, :], state)[..., 0, :] * plan.scale  # [B, H, V]
        return state, put(output, row[:, None].astype(output.dtype), t)

    if "g_gamma" in arrays:
        gamma = arrays["g_gamma"].astype(plan.state)
        gamma = gamma if run is None or run.packed is None else take(gamma, run.packed.sequence, 1, axis=0)
        constant = jnp.exp(gamma)[..., None, None]  # [B, H, 1, 1]
    count = span[1] - span[0]
    if isinstance(count, int) and count <= UNROLLED_STEPS:
        for i in range(count):
            state, output = step(i, (state, output))
        return state, output
    return lax.fori_loop(0, count, step, (state, output))
