"""Blockwise softmax attention: an online softmax over blocks of keys, in memory linear in the lengths.

Forward, for a block of queries, over the key blocks it can see (`top` is the running maximum of the logits):

    e     = exp(logits - new_top)
    total = total * exp(top - new_top) + sum(e)
    acc   = acc   * exp(top - new_top) + dropped(e) value
    output = acc / total,   share = 1 / total

Backward, over the same tiles, with p = exp(logits - top) * share recomputed and delta = sum(d_output * output):

    d_value  += dropped(p)^T d_output
    d_logits  = p * (dropped(d_output value^T) - delta)

and the way from d_logits to scores and bias is JAX's own gradient of `finish`.
A sink is a logit that is there before the first block: it starts `top` and `total`. These are kept apart: in top + log(total)
a bias of -1e9 for every key of a query, which many use for -inf, would leave nothing of the logarithm.

Forward mode differentiates the forward loops; derivatives of derivatives are those of the direct form, which keeps all scores.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jaxtyping import Array, Float

from ejkernel._kept import ATTENTION_OUTPUT, ATTENTION_SUMS, named
from ejkernel._sizes import as_value, known
from ejkernel._varying import vary, varying_axes
from ejkernel.kernels._attention.direct import direct_output
from ejkernel.kernels._attention.logits import (
    Tile,
    alike_varying,
    cut,
    cut_bias,
    drop,
    finish,
    flat_rows,
    grouped_rows,
    keep_mask,
    product,
    scaled_query,
    sum_dtype,
)
from ejkernel.kernels._attention.problem import AttentionProblem
from ejkernel.kernels._xla._transposable import call, linear_map
from ejkernel.kernels._xla.attention._visits import visits

Sums = Float[Array, "B Hkv G T"]


class Blocks(NamedTuple):
    """The sizes of blocks, and how many keys are real in a problem padded to multiples of them."""

    size_q: int
    size_k: int
    kv_end: int

    def tile(self, i: Array, j: Array) -> Tile:
        """The tile of query block i and key block j."""
        start_q, start_k = _int32(i) * self.size_q, _int32(j) * self.size_k
        return Tile(start_q, start_k, self.size_q, self.size_k, self.kv_end)


def _int32(i: Array | int) -> Array:
    """An index in 32 bits; loops count in 64 bits under x64, and in Python without `jit`."""
    return lax.convert_element_type(i, jnp.int32)


def blockwise_output(problem: AttentionProblem, block_q: int, block_k: int) -> Float[Array, "B T H V"]:
    """The output in the compute dtype; blocks are at most as large as the lengths."""
    q_len, kv_len = problem.q_len, problem.kv_len
    if 0 in problem.query.shape or kv_len == 0:
        return jnp.zeros((*problem.query.shape[:3], problem.value_dim), problem.dtype)
    at_most = lambda block, length: min(block, length) if known(length) else block
    blocks = Blocks(at_most(block_q, q_len), at_most(block_k, kv_len), kv_len)
    # A packing's rows say nothing that its segment ids do not.
    leaves, form = jax.tree.flatten(alike_varying(dataclasses.replace(problem, packing=None)))
    return _attend(blocks, form, leaves)


def _padded(problem: AttentionProblem, blocks: Blocks) -> AttentionProblem:
    """The problem with padding after the last query and the last key; axes that do not vary stay as they are."""
    # Written so, a length that is not known comes out as blocks times size.
    more_q, more_k = (
        -(-length // size) * size - length for length, size in ((problem.q_len, blocks.size_q), (problem.kv_len, blocks.size_k))
    )

    def pad(name: str, axis: int, more: int, fill: int = 0) -> None:
        x = getattr(problem, name)
        if x is not None and x.shape[axis] != 1 and not (known(more) and more == 0):
            widths = [(0, more if axis == n else 0) for n in range(x.ndim)]
            changed[name] = jnp.pad(changed.get(name, x), widths, constant_values=fill)

    changed: dict[str, Any] = {}
    for name, axis, fill in (("query", 1, 0), ("q_segment_ids", 1, -1), ("q_positions", 1, 0), ("dropout_words", 2, 0)):
        pad(name, axis, more_q, fill)
    for name, axis, fill in (("key", 1, 0), ("value", 1, 0), ("kv_segment_ids", 1, -1), ("kv_positions", 1, 0)):
        pad(name, axis, more_k, fill)
    for name in ("bias", "mask"):
        pad(name, 2, more_q)
        pad(name, 3, more_k)
    return dataclasses.replace(problem, **changed) if changed else problem


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _attend(blocks: Blocks, form: Any, leaves: list[Array]) -> Float[Array, "B T H V"]:
    """The output of the problem that has these arrays, in the form that `jax.tree.flatten` gives."""
    return call(_Attend(blocks, form), *leaves)[0]


@functools.partial(_attend.defjvp, symbolic_zeros=True)
def _attend_jvp(blocks: Blocks, form: Any, primals: Any, tangents: Any) -> Any:
    (leaves,), (moved,) = primals, tangents
    output, *sums = call(_Attend(blocks, form, keep_sums=True), *leaves)
    output, sums = named(ATTENTION_OUTPUT, output), [named(ATTENTION_SUMS, x) for x in sums]
    moving = tuple(i for i, t in enumerate(moved) if not isinstance(t, SymbolicZero))
    if not moving:
        return output, jnp.zeros_like(output)
    tangent = _Derivative(blocks, form, moving)
    transpose = dataclasses.replace(tangent, transposed=True)
    return output, linear_map(tangent, transpose, [*leaves, output, *sums], [moved[i] for i in moving])[0]


@dataclasses.dataclass(frozen=True)
class _Attend:
    """`(*leaves) -> (output)`, and `top` and `share` when the gradient wants them (see `_transposable`)."""

    blocks: Blocks
    form: Any
    keep_sums: bool = False
    is_plain: bool = False

    def __call__(self, *leaves: Array) -> list[Array]:
        problem = jax.tree.unflatten(self.form, leaves)
        if self.is_plain:
            sums = jax.eval_shape(functools.partial(_forward, self.blocks), problem)[1:]
            return [direct_output(problem), *(jnp.zeros(x.shape, x.dtype) for x in sums)][: 1 + 2 * self.keep_sums]
        return list(_forward(self.blocks, problem))[: 1 + 2 * self.keep_sums]

    def plain(self) -> _Attend:
        return dataclasses.replace(self, is_plain=True)

    def varies(self, mapped: Sequence[bool]) -> tuple[bool, ...]:
        return (any(mapped),) * (1 + 2 * self.keep_sums)


@dataclasses.dataclass(frozen=True)
class _Derivative:
    """The derivative of `_attend` in the `moving` leaves, or its transpose.

    `(*leaves, output, top, share, *tangents of moving) -> (d_output)`, transposed
    `(*leaves, output, top, share, d_output) -> cotangents of moving`.
    """

    blocks: Blocks
    form: Any
    moving: tuple[int, ...]
    transposed: bool = False
    is_plain: bool = False

    def __call__(self, *flat: Array) -> list[Array]:
        count = self.form.num_leaves
        leaves, (output, top, share, *rest) = list(flat[:count]), flat[count:]

        def run(*some: Array) -> Array:
            changed = list(leaves)
            for i, x in zip(self.moving, some, strict=True):
                changed[i] = x
            problem = jax.tree.unflatten(self.form, changed)
            return direct_output(problem) if self.is_plain else _forward(self.blocks, problem)[0]

        some = tuple(leaves[i] for i in self.moving)
        if not self.transposed:
            return [jax.jvp(run, some, tuple(rest))[1]]
        if self.is_plain:
            return list(jax.vjp(run, *some)[1](rest[0]))
        found = _backward(self.blocks, jax.tree.unflatten(self.form, leaves), output, (top, share), rest[0])
        grads = self.form.flatten_up_to(found)
        return [grads[i] for i in self.moving]

    def plain(self) -> _Derivative:
        return dataclasses.replace(self, is_plain=True)

    def varies(self, mapped: Sequence[bool]) -> tuple[bool, ...]:
        return (any(mapped),) * (len(self.moving) if self.transposed else 1)


def _start(problem: AttentionProblem, shape: tuple[int, ...], fill: float, dtype: Any) -> Array:
    """A constant array to start a loop with, of the same kind as what the loop makes of it."""
    return vary(jnp.full(shape, fill, dtype), varying_axes(problem.query))


# Jitted, so that JAX traces the loops once for all that it asks of them.
@functools.partial(jax.jit, static_argnums=(0,))
def _forward(blocks: Blocks, problem: AttentionProblem) -> tuple[Float[Array, "B T H V"], Sums, Sums]:
    """The output, `top` and `share`; `top` is +inf where nothing is attended to, so that exp(x - top) is 0."""
    q_len, problem = problem.q_len, _padded(problem, blocks)
    start = functools.partial(_start, problem)
    wide, sums, plan = problem.accumulation_dtype, sum_dtype(problem), visits(problem, blocks.size_q, blocks.size_k)
    order = jnp.asarray(plan.order)
    query = scaled_query(problem)  # [B, Hkv, G, T, D]
    key, value = jnp.moveaxis(problem.key, 1, 2), jnp.moveaxis(problem.value, 1, 2)  # [B, Hkv, S, D], [B, Hkv, S, V]
    rows = (*query.shape[:3], blocks.size_q)
    first = start(rows, -jnp.inf, sums), start(rows, 0, sums)
    if problem.sinks is not None:
        top = start(rows, 0, sums) + problem.sinks.astype(sums).reshape(1, problem.kv_heads, problem.groups, 1)
        first = lax.stop_gradient(top), jnp.exp(top - lax.stop_gradient(jnp.where(top == -jnp.inf, 0, top)))

    def key_block(i: Array, q: Array, n: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, acc = carry  # [B, Hkv, G, q] twice, [B, Hkv, G, q, V]
        tile = blocks.tile(i, order[i, n])
        k, v = (cut(x, 2, tile.start_k, tile.size_k) for x in (key, value))  # [B, Hkv, k, D], [B, Hkv, k, V]
        scores = product(problem, "bhgqd,bhkd->bhgqk", q, k)
        x = finish(problem, scores, cut_bias(problem, tile), keep_mask(problem, tile))
        new_top = lax.stop_gradient(jnp.maximum(top, x.max(-1).astype(sums)))  # the result does not depend on it
        finite = jnp.where(new_top == -jnp.inf, 0, new_top)
        e = jnp.exp(x - finite[..., None].astype(x.dtype))
        shrink = jnp.exp(top - finite)
        acc = acc * shrink[..., None].astype(wide) + product(problem, "bhgqk,bhkv->bhgqv", drop(problem, e, tile), v)
        return new_top, total * shrink + e.sum(-1, dtype=sums), acc

    def query_block(i: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        output, tops, shares = carry
        at = _int32(i) * blocks.size_q
        q = cut(query, 3, at, blocks.size_q)
        acc = start((*rows, problem.value_dim), 0, wide)
        top, total, acc = lax.fori_loop(0, plan.number(i), functools.partial(key_block, i, q), (*first, acc))
        # Logits of -inf less a top of -inf would be NaN; the sum is 0 only where nothing attends.
        top, total = jnp.where(total == 0, jnp.inf, top), jnp.where(total == 0, 1, total)
        acc = flat_rows(problem, acc / total[..., None].astype(wide)).astype(problem.dtype)
        put = lax.dynamic_update_slice_in_dim
        return put(output, acc, at, 1), put(tops, top, at, 3), put(shares, 1 / total, at, 3)

    outputs = start((*problem.query.shape[:3], problem.value_dim), 0, problem.dtype)
    none = start((*rows[:3], problem.q_len), 0, sums)
    found = lax.fori_loop(0, as_value(problem.q_len // blocks.size_q), query_block, (outputs, none, none))
    return found[0][:, :q_len], found[1][..., :q_len], found[2][..., :q_len]


class _Gradients(NamedTuple):
    """Sums over tiles, in the accumulation dtype. Those of keys and values have their channels before the length: so they
    come out of products whose large factor, a tile of weights, is read row by row."""

    query: Array  # [B, Hkv, G, T, D], of the scaled query
    key: Array  # [B, Hkv, D, S]
    value: Array  # [B, Hkv, V, S]
    bias: Array | None  # [b, h, g, t, s]


@functools.partial(jax.jit, static_argnums=(0,))
def _backward(
    blocks: Blocks, problem: AttentionProblem, output: Array, kept: tuple[Sums, Sums], d_output: Float[Array, "B T H V"]
) -> AttentionProblem:
    """The gradient in the problem's own form; None where there is none."""
    given, problem = problem, _padded(problem, blocks)
    after = [(0, problem.q_len - given.q_len)]
    output, d_output = (jnp.pad(x, [(0, 0), *after, (0, 0), (0, 0)]) for x in (output, d_output))
    more_rows = lambda x, fill: jnp.pad(x, [(0, 0), (0, 0), (0, 0), *after], constant_values=fill)
    top, share = more_rows(kept[0], jnp.inf), more_rows(kept[1], 1)
    start = functools.partial(_start, problem)
    wide, plan = problem.accumulation_dtype, visits(problem, blocks.size_q, blocks.size_k)
    order = jnp.asarray(plan.order)
    query, d_rows = scaled_query(problem), grouped_rows(problem, d_output).astype(wide)  # [B, Hkv, G, T, D|V]
    query_t, d_rows_t = (jnp.moveaxis(x, 4, 2) for x in (query, d_rows))  # [B, Hkv, D|V, G, T]
    key, value = jnp.moveaxis(problem.key, 1, 2), jnp.moveaxis(problem.value, 1, 2)  # [B, Hkv, S, D|V]
    delta = (d_rows * grouped_rows(problem, output).astype(wide)).sum(-1)  # [B, Hkv, G, T]

    def key_block(i: Array, n: Array, carry: tuple[Array, _Gradients]) -> tuple[Array, _Gradients]:
        d_q, sums = carry
        tile = blocks.tile(i, order[i, n])
        q, d_out = (cut(x, 3, tile.start_q, tile.size_q) for x in (query, d_rows))
        q_t, d_out_t = (cut(x, 4, tile.start_q, tile.size_q) for x in (query_t, d_rows_t))
        k, v = (cut(x, 2, tile.start_k, tile.size_k) for x in (key, value))
        tops, shares, deltas = (cut(x, 3, tile.start_q, tile.size_q)[..., None] for x in (top, share, delta))
        keep, scores = keep_mask(problem, tile), product(problem, "bhgqd,bhkd->bhgqk", q, k)
        x, pull = jax.vjp(lambda scores, bias: finish(problem, scores, bias, keep), scores, cut_bias(problem, tile))
        p = jnp.exp(x - tops.astype(x.dtype)) * shares.astype(x.dtype)  # [B, Hkv, G, q, k]
        d_p = drop(problem, product(problem, "bhgqv,bhkv->bhgqk", d_out, v), tile)
        # Where one key has all the weight, d_p = delta; large queries would blow up the rounding error of the difference.
        d_x = jnp.where(p == 1, 0, p.astype(wide) * (d_p - deltas))
        d_scores, d_bias = pull(d_x.astype(x.dtype))
        d_v = product(problem, "bhvgq,bhgqk->bhvk", d_out_t, drop(problem, p, tile))
        d_k = product(problem, "bhdgq,bhgqk->bhdk", q_t, d_scores)
        return d_q + product(problem, "bhgqk,bhkd->bhgqd", d_scores, k), sums._replace(
            key=_add(sums.key, d_k, {3: tile.start_k}),
            value=_add(sums.value, d_v, {3: tile.start_k}),
            bias=None if sums.bias is None else _add(sums.bias, d_bias, {3: tile.start_q, 4: tile.start_k}),
        )

    def query_block(i: Array, sums: _Gradients) -> _Gradients:
        d_q = start((*query.shape[:3], blocks.size_q, query.shape[4]), 0, wide)
        d_q, sums = lax.fori_loop(0, plan.number(i), functools.partial(key_block, i), (d_q, sums))
        return sums._replace(query=lax.dynamic_update_slice_in_dim(sums.query, d_q, _int32(i) * blocks.size_q, 3))

    sums = _Gradients(
        query=start(query.shape, 0, wide),
        key=start((*key.shape[:2], key.shape[3], key.shape[2]), 0, wide),
        value=start((*value.shape[:2], value.shape[3], value.shape[2]), 0, wide),
        bias=None if problem.bias is None else start(problem.grouped(problem.bias).shape, 0, wide),
    )
    sums = lax.fori_loop(0, as_value(problem.q_len // blocks.size_q), query_block, sums)
    return _cotangents(given, sums, top, share, delta)


def _add(total: Array, part: Array, starts: dict[int, Any]) -> Array:
    """Adds a part to the total at these places; an axis of size 1 in the total starts at 0."""
    zero = jnp.zeros((), jnp.int32)
    at = [starts[n] if n in starts and total.shape[n] > 1 else zero for n in range(total.ndim)]
    return lax.dynamic_update_slice(total, lax.dynamic_slice(total, at, part.shape) + part.astype(total.dtype), at)


def _cotangents(problem: AttentionProblem, sums: _Gradients, top: Sums, share: Sums, delta: Array) -> AttentionProblem:
    """The gradients of a problem from sums over its padded form."""
    sinks, bias, scale, q_len, kv_len = problem.sinks, problem.bias, problem.traced_scale, problem.q_len, problem.kv_len
    if sinks is not None:
        weights = jnp.exp(sinks.reshape(1, problem.kv_heads, problem.groups, 1).astype(top.dtype) - top) * share
        sinks = -(weights * delta.astype(weights.dtype)).sum((0, 3)).reshape(-1).astype(sinks.dtype)
    d_query = flat_rows(problem, sums.query)[:, :q_len]
    if scale is not None:
        total = (d_query * problem.query.astype(d_query.dtype)).sum()
        d_query, scale = d_query * scale.astype(d_query.dtype), total.astype(scale.dtype)
    if bias is not None:
        assert sums.bias is not None
        d_bias = sums.bias[:, :, :, : bias.shape[2], : bias.shape[3]]
        bias = d_bias.reshape(bias.shape).astype(bias.dtype)
    return AttentionProblem(
        query=(d_query * problem.scale).astype(problem.dtype),
        key=jnp.moveaxis(sums.key, 3, 1)[:, :kv_len].astype(problem.dtype),
        value=jnp.moveaxis(sums.value, 3, 1)[:, :kv_len].astype(problem.dtype),
        bias=bias,
        sinks=sinks,
        traced_scale=scale,
        **problem.static_fields,
    )
