"""The loops over chunks: forward in the order of the recurrence, backward against it.

The state is the loop's carry; rows are read and written where they lie. The forward pass keeps the state before each chunk
when a gradient will be asked; the backward pass recomputes everything else from it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel._varying import vary, varying_axes
from ejkernel.kernels._delta.problem import normalised
from ejkernel.kernels._xla.gated_delta_rule import _channel_gate, _chunk, _head_gate
from ejkernel.kernels._xla.gated_delta_rule._layout import Layout, Place
from ejkernel.kernels._xla.linear._products import Matmul

Array = jax.Array
Arrays = Mapping[str, Array]  # query, key, value, beta, and those of g, initial_state that are given
PER_TOKEN = ("query", "key", "value", "beta", "g")
UNROLLED_STEPS = 4


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about a call; equal plans compile once."""

    schedule: str
    rows: int  # C: tokens per chunk
    scale: float
    reverse: bool
    use_qk_l2norm: bool
    state: np.dtype
    output: np.dtype
    on_cpu: bool  # then chunks that no packed sequence needs are left out: a branch, cheap there alone

    @property
    def matmul(self) -> Matmul:
        return Matmul(self.state, self.state, self.on_cpu)

    def layout(self, tokens: Any, cu_seqlens: Array | None, keep_states: bool) -> Layout:
        if cu_seqlens is not None:
            return Layout.packed(self.rows, tokens, self.reverse, cu_seqlens)
        rows = self.rows
        if self.schedule == "recurrent" and not keep_states and isinstance(tokens, int):
            rows = -(-tokens // -(-tokens // rows))  # steps need no power of two, so few rows are left empty
        return Layout.dense(rows, tokens, self.reverse)

    def query(self, rows: Array) -> Array:
        """Queries as they enter the recurrence: normalised if asked for, and scaled."""
        return self.key(rows) * self.scale

    def key(self, rows: Array) -> Array:
        return normalised(rows) if self.use_qk_l2norm else rows


def forward(plan: Plan, arrays: Arrays, cu_seqlens: Array | None, keep_states: bool) -> tuple[Array, ...]:
    """(output `[B, T, H, V]`, final state `[N, H, K, V]`), and the state before each chunk `[chunks, B, H, K, V]` if kept."""
    (B, T, H, V), K = arrays["value"].shape, arrays["key"].shape[-1]
    layout = plan.layout(T, cu_seqlens, keep_states)
    rows = {name: layout.split(arrays[name]) for name in PER_TOKEN if name in arrays}
    axes = varying_axes(*arrays.values(), *([] if cu_seqlens is None else [cu_seqlens]))
    sequences = B if cu_seqlens is None else cu_seqlens.shape[0] - 1
    initial = arrays.get("initial_state")
    initial = vary(jnp.zeros((sequences, H, K, V), plan.state) if initial is None else initial, axes)
    run = _steps if plan.schedule == "recurrent" else _products

    def chunk(carry: tuple[Array, Array | None], x: tuple[Array, Place | None]) -> Any:
        (state, finals), (i, place) = carry, x
        if place is not None:
            state = jnp.where(place.first, lax.dynamic_index_in_dim(initial, place.sequence, 0), state)
        before = state
        state, output = run(plan, layout, {name: layout.chunk(y, i) for name, y in rows.items()}, state)
        if finals is not None:  # each chunk of a sequence writes; its last one stays
            assert place is not None
            finals = lax.dynamic_update_index_in_dim(finals, state, place.sequence, 0)
        return (state, finals), ({"output": output}, before if keep_states else None)

    start = (initial, None) if cu_seqlens is None else (vary(jnp.zeros((B, H, K, V), plan.state), axes), initial)
    xs = _index(layout), layout.place
    (state, finals), written, states = _scan(plan, layout, chunk, start, xs, layout.flips)
    found = written["output"], state if finals is None else finals
    return (*found, states) if keep_states else found


def backward(
    plan: Plan,
    wanted: tuple[str, ...],
    arrays: Arrays,
    cu_seqlens: Array | None,
    states: Array,
    doutput: Array,
    dfinal: Array,
) -> dict[str, Array]:
    """The gradients of the `wanted` arrays from the cotangents of output and final state."""
    layout = plan.layout(arrays["value"].shape[1], cu_seqlens, keep_states=True)
    rows = {name: layout.split(arrays[name]) for name in PER_TOKEN if name in arrays}
    axes = varying_axes(*arrays.values(), doutput, dfinal, states, *([] if cu_seqlens is None else [cu_seqlens]))
    dfinal = vary(dfinal.astype(plan.state), axes)

    def chunk(carry: tuple[Array, Array | None], x: Any) -> Any:
        (dstate, dinitials), (i, state, place) = carry, x
        if place is not None:
            dstate = jnp.where(place.last, lax.dynamic_index_in_dim(dfinal, place.sequence, 0), dstate)
        mine = {name: layout.chunk(y, i) for name, y in rows.items()}
        dstate, found = _products_backward(plan, layout, mine, state, dstate, layout.chunk(drows, i))
        if dinitials is not None:  # against the recurrence a sequence's first chunk comes last, and stays
            dinitials = lax.dynamic_update_index_in_dim(dinitials, dstate, place.sequence, 0)
        return (dstate, dinitials), ({name: found[name] for name in wanted if name in found}, None)

    # An empty sequence hands its final state's cotangent to its initial state.
    start = (dfinal, None) if cu_seqlens is None else (vary(jnp.zeros_like(states[0]), axes), dfinal)
    xs, drows = (_index(layout), states, layout.place), layout.split(doutput)
    (dstate, dinitials), grads, _ = _scan(plan, layout, chunk, start, xs, not layout.flips)
    if "initial_state" in wanted:
        grads["initial_state"] = dstate if dinitials is None else dinitials
    return grads


def _index(layout: Layout) -> Array:
    return jnp.arange(layout.chunks, dtype=jnp.int32)


def _scan(
    plan: Plan, layout: Layout, chunk: Callable, start: Any, xs: tuple, reverse: bool
) -> tuple[Any, dict[str, Array], Any]:
    """(last carry, rows `[B, T, ...]` by name, what is kept of each chunk) of `chunk(carry, x) -> (carry, (rows, kept))`.

    Chunks that no packed sequence uses change nothing. A single chunk, as in decoding, needs no loop.
    """
    once = lambda: chunk(start, jax.tree.map(lambda x: x[0], xs))
    if layout.chunks == 1:
        carry, (rows, kept) = once()
        return carry, {name: layout.joined(x[:, None]) for name, x in rows.items()}, jax.tree.map(lambda x: x[None], kept)
    shapes, axes = jax.eval_shape(once)[1], varying_axes(*jax.tree.leaves(start))
    nothing = lambda shape, dtype: vary(jnp.zeros(shape, dtype), axes)

    def if_used(carry: Any, x: tuple) -> Any:
        unchanged = lambda: (carry, jax.tree.map(lambda y: nothing(y.shape, y.dtype), shapes))
        return lax.cond(x[-1].used, lambda: chunk(carry, x), unchanged)

    run = if_used if layout.table is not None and plan.on_cpu else chunk

    # Written where they lie at once: stacked by chunks first they would take as much memory again, and a copy.
    def written(carry: Any, x: tuple) -> Any:
        carry, whole = carry
        carry, (rows, kept) = run(carry, x)
        return (carry, {name: layout.placed(whole[name], rows[name], x[0]) for name in whole}), kept

    whole = {name: nothing(layout.shape(x.shape), x.dtype) for name, x in shapes[0].items()}
    (carry, whole), kept = lax.scan(written, (start, whole), xs, reverse=reverse)
    return carry, {name: layout.joined(x) for name, x in whole.items()}, kept


def _read(plan: Plan, layout: Layout, rows: Mapping[str, Array]) -> dict[str, Array]:
    heads = rows["value"].shape[2]
    return {name: layout.read(x, heads, plan.state) for name, x in rows.items()}  # [B, H, C, ...]


def _products(plan: Plan, layout: Layout, rows: Mapping[str, Array], state: Array) -> tuple[Array, Array]:
    """A chunk by matrix products: (state after it, output `[B, C, H, V]`)."""
    mm, x = plan.matmul, _read(plan, layout, rows)
    decay = jnp.exp(x["g"]) if "g" in x else None
    s, _ = _gate(decay).scores(mm, plan.query(x["query"]), plan.key(x["key"]), decay)
    state, output = _chunk.forward(mm, state, s, x["value"], x["beta"][..., None])
    return state, layout.write(output, output.shape[1], plan.output)


def _products_backward(
    plan: Plan, layout: Layout, rows: Mapping[str, Array], state: Array, dstate: Array, drows: Array
) -> tuple[Array, dict[str, Array]]:
    """(adjoint of the state before the chunk, gradients by name as they lie in `rows`)."""
    mm, x = plan.matmul, _read(plan, layout, {**rows, "doutput": drows})
    q, query_gradient = jax.vjp(plan.query, x["query"])
    k, key_gradient = jax.vjp(plan.key, x["key"])
    decay = jnp.exp(x["g"]) if "g" in x else None
    gate = _gate(decay)
    s, kept = gate.scores(mm, q, k, decay)
    dstate, dv, db, dscores = _chunk.backward(mm, state, dstate, s, x["value"], x["beta"][..., None], x["doutput"])
    dq, dk, dg = gate.gradients(mm, q, k, s, kept, dscores)
    found = {"query": query_gradient(dq)[0], "key": key_gradient(dk)[0], "value": dv, "beta": db[..., 0]}
    found |= {} if dg is None else {"g": dg}
    return dstate, {name: layout.write(grad, rows[name].shape[2], rows[name].dtype) for name, grad in found.items()}


def _gate(decay: Array | None) -> Any:
    """The module that makes scores with this kind of gate."""
    return _channel_gate if decay is not None and decay.ndim == 4 else _head_gate


def _steps(plan: Plan, layout: Layout, rows: Mapping[str, Array], state: Array) -> tuple[Array, Array]:
    """A chunk token by token: (state after it, output `[B, C, H, V]`). Two passes over the state for each token."""
    mm, heads = plan.matmul, rows["value"].shape[2]
    x = {name: layout.by_token(y, heads, plan.state) for name, y in rows.items()}  # [C, B, H, ...]
    q, k = plan.query(x["query"]), plan.key(x["key"])
    # What needs no state is computed for the whole chunk: a step costs about as much as the operations that it starts.
    read, by_token = jnp.stack([q, k], -2), {"key": k, "value": x["value"], "beta": x["beta"][..., None]}
    if "g" in x:
        by_token["decay"] = jnp.exp(x["g"] if x["g"].ndim == 4 else x["g"][..., None])  # [C, B, H, 1 | K]
        read = read * by_token["decay"][..., None, :]
    by_token |= {"read": read, "own": mm.row_sums(q * k)}  # [C, B, H, 2, K], [C, B, H, 1]

    def step(S: Array, row: dict[str, Array]) -> tuple[Array, Array]:
        seen = mm.nn(row["read"], S)  # [B, H, 2, V]: of the decayed state, by query and key
        u = row["beta"] * (row["value"] - seen[..., 1, :])  # [B, H, V]
        S = (S * row["decay"][..., None] if "decay" in row else S) + row["key"][..., None] * u[..., None, :]
        return S, seen[..., 0, :] + row["own"] * u

    if layout.rows <= UNROLLED_STEPS:
        outputs = []
        for t in range(layout.rows):
            state, output = step(state, {name: y[t] for name, y in by_token.items()})
            outputs.append(output)
        output = jnp.stack(outputs)
    else:
        state, output = lax.scan(step, state, by_token)  # [C, B, H, V]
    return state, layout.from_tokens(output, plan.output)
