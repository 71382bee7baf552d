"""Blockwise softmax attention: an online softmax over blocks of keys, in memory linear in the lengths.

Forward, for a block of queries, over the key blocks it can see (`top` is the running maximum of the logits):

    e     = exp(logits - new_top)
    total = total * exp(top - new_top) + sum(e)
    acc   = acc   * exp(top - new_top) + dropped(e) value
    output = acc / total,   lse = top + log(total)

Backward, over the same tiles, with p = exp(logits - lse) recomputed and delta = sum(d_output * output):

    d_value  += dropped(p)^T d_output
    d_logits  = p * (dropped(d_output value^T) - delta)

and the rest of the way, from d_logits to query, key, bias and scale, is JAX's own gradient of the tile's logits.
A sink is a logit that is there before the first block: it starts `top` and `total`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ejkernel.kernels._attention.problem import AttentionProblem
from ejkernel.kernels._xla.attention._logits import (
    Factors,
    Tile,
    alike_varying,
    cut,
    cut_query,
    drop,
    factors,
    grouped_sinks,
    keep_mask,
    logits,
    product,
    sum_dtype,
    vary,
    varying_axes,
)
from ejkernel.kernels._xla.attention._visits import visits


class Blocks(NamedTuple):
    """The sizes of blocks, and how many keys are real in a problem padded to multiples of them."""

    size_q: int
    size_k: int
    kv_end: int

    def tile(self, i: int | Array, j: int | Array) -> Tile:
        """The tile of query block i and key block j."""
        return Tile(i * self.size_q, j * self.size_k, self.size_q, self.size_k, self.kv_end)


def blockwise_output(problem: AttentionProblem, block_q: int, block_k: int) -> Float[Array, "B T H V"]:
    """The output in the compute dtype; blocks are at most as large as the lengths."""
    q_len, kv_len = problem.q_len, problem.kv_len
    if q_len == 0 or kv_len == 0:
        return jnp.zeros((*problem.query.shape[:3], problem.value_dim), problem.dtype)
    blocks = Blocks(min(block_q, q_len), min(block_k, kv_len), kv_len)
    problem = alike_varying(_padded(problem, -q_len % blocks.size_q, -kv_len % blocks.size_k))
    return _attend(blocks, problem)[:, :q_len]


def _padded(problem: AttentionProblem, more_q: int, more_k: int) -> AttentionProblem:
    """The problem with padding after the last query and the last key; axes that do not vary stay as they are."""

    def pad(name: str, axis: int, more: int, fill: int = 0) -> None:
        x = getattr(problem, name)
        if more and x is not None and x.shape[axis] > 1:
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


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(blocks: Blocks, problem: AttentionProblem) -> Float[Array, "B T H V"]:
    return _forward(blocks, problem)[0]


def _attend_fwd(blocks: Blocks, problem: AttentionProblem) -> tuple[Array, tuple[AttentionProblem, Array, Array]]:
    output, lse = _forward(blocks, problem)
    return output, (problem, output, lse)


def _start(problem: AttentionProblem, shape: tuple[int, ...], fill: float, dtype: Any) -> Array:
    """A constant array to start a loop with, of the same kind as what the loop makes of it."""
    return vary(jnp.full(shape, fill, dtype), varying_axes(problem.query))


def _forward(blocks: Blocks, problem: AttentionProblem) -> tuple[Float[Array, "B T H V"], Float[Array, "B Hkv G T"]]:
    """The output and the log of the softmax's sum; +inf where nothing is attended to, so that exp(x - lse) is 0."""
    start = functools.partial(_start, problem)
    batch, q_len, heads, _ = problem.query.shape
    rows = (batch, problem.kv_heads, heads // problem.kv_heads, blocks.size_q)
    wide, sums = problem.accumulation_dtype, sum_dtype(problem)
    sinks, plan = grouped_sinks(problem), visits(problem, blocks.size_q, blocks.size_k)
    if sinks is None:
        first = start(rows, -jnp.inf, sums), start(rows, 0, sums)
    else:
        top = start(rows, 0, sums) + sinks.astype(sums)[..., None]
        first = top, (top > -jnp.inf).astype(sums)

    def query_block(i: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        def key_block(n: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, acc = carry
            tile = blocks.tile(i, order[i, n])
            x = logits(problem, factors(problem, tile), keep_mask(problem, tile))  # [B, Hkv, G, q, k]
            new_top = jnp.maximum(top, x.max(-1).astype(sums))  # [B, Hkv, G, q]
            finite = jnp.where(new_top == -jnp.inf, 0, new_top)
            e = jnp.exp(x - finite[..., None].astype(x.dtype))
            shrink = jnp.exp(top - finite)
            value = cut(problem.value, 1, tile.start_k, tile.size_k)  # [B, k, Hkv, V]
            acc = acc * shrink[..., None].astype(wide) + product(problem, "bhgqk,bkhv->bhgqv", drop(problem, e, tile), value)
            return new_top, total * shrink + e.sum(-1, dtype=sums), acc

        output, lse = carry
        acc = start((*rows, problem.value_dim), 0, wide)
        top, total, acc = lax.fori_loop(0, plan.number(i), key_block, (*first, acc))
        acc = acc / jnp.where(total == 0, 1, total)[..., None].astype(wide)
        acc = jnp.moveaxis(acc, 3, 1).reshape(batch, blocks.size_q, heads, -1).astype(problem.dtype)
        # log(0) = -inf would turn into NaN against logits of -inf; the sum is 0 only where nothing attends.
        row_lse = jnp.where(total == 0, jnp.inf, top + jnp.log(total))
        at = i * blocks.size_q
        return lax.dynamic_update_slice_in_dim(output, acc, at, 1), lax.dynamic_update_slice_in_dim(lse, row_lse, at, 3)

    order = jnp.asarray(plan.order)
    outputs = start((batch, q_len, heads, problem.value_dim), 0, problem.dtype)
    lse = start((*rows[:3], q_len), 0, sums)
    return lax.fori_loop(0, q_len // blocks.size_q, query_block, (outputs, lse))


class _Gradients(NamedTuple):
    """Sums over tiles, in the accumulation dtype."""

    query: Array  # [B, T, H, D]
    key: Array  # [B, S, Hkv, D]
    value: Array  # [B, S, Hkv, V]
    bias: Array | None  # [b, h, g, t, s]
    scale: Array | None


def _attend_bwd(
    blocks: Blocks, residuals: tuple[AttentionProblem, Array, Array], d_output: Float[Array, "B T H V"]
) -> tuple[AttentionProblem]:
    problem, output, lse = residuals
    wide, plan = problem.accumulation_dtype, visits(problem, blocks.size_q, blocks.size_k)
    order = jnp.asarray(plan.order)
    delta = (d_output.astype(wide) * output.astype(wide)).sum(-1)  # [B, T, H]
    delta = jnp.moveaxis(delta.reshape(*delta.shape[:2], problem.kv_heads, -1), 1, 3)  # [B, Hkv, G, T]

    def key_block(i: Array, n: Array, sums: _Gradients) -> _Gradients:
        tile = blocks.tile(i, order[i, n])
        keep = keep_mask(problem, tile)
        x, pull = jax.vjp(lambda y: logits(problem, y, keep), _differentiable(problem, tile))
        lse_rows = cut(lse, 3, tile.start_q, tile.size_q)[..., None]
        p = jnp.exp(x - lse_rows.astype(x.dtype))  # [B, Hkv, G, q, k]
        value = cut(problem.value, 1, tile.start_k, tile.size_k)  # [B, k, Hkv, V]
        d_rows = cut_query(problem, d_output, tile)  # [B, q, Hkv, G, V]
        d_value = product(problem, "bhgqk,bqhgv->bkhv", drop(problem, p, tile), d_rows)
        d_p = drop(problem, product(problem, "bqhgv,bkhv->bhgqk", d_rows, value), tile)
        delta_rows = cut(delta, 3, tile.start_q, tile.size_q)[..., None]
        (d,) = pull((p * (d_p - delta_rows)).astype(x.dtype))
        return _Gradients(
            query=_add(sums.query, d.query.reshape(*d.query.shape[:2], problem.heads, -1), {1: tile.start_q}),
            key=_add(sums.key, d.key, {1: tile.start_k}),
            value=_add(sums.value, d_value, {1: tile.start_k}),
            bias=None if sums.bias is None else _add(sums.bias, d.bias, {3: tile.start_q, 4: tile.start_k}),
            scale=None if sums.scale is None else sums.scale + d.scale,
        )

    def query_block(i: Array, sums: _Gradients) -> _Gradients:
        return lax.fori_loop(0, plan.number(i), functools.partial(key_block, i), sums)

    zero = lambda x: _start(problem, x.shape, 0, wide)  # noqa: E731
    sums = _Gradients(
        query=zero(problem.query),
        key=zero(problem.key),
        value=zero(problem.value),
        bias=None if problem.bias is None else zero(problem.grouped(problem.bias)),
        scale=None if problem.traced_scale is None else zero(problem.traced_scale),
    )
    sums = lax.fori_loop(0, problem.q_len // blocks.size_q, query_block, sums)
    return (_cotangents(problem, sums, lse, delta),)


def _differentiable(problem: AttentionProblem, tile: Tile) -> Factors:
    """The factors of a tile in the accumulation dtype, so that no gradient is rounded before it is summed."""
    return jax.tree.map(lambda x: x.astype(problem.accumulation_dtype) if isinstance(x, Array) else x, factors(problem, tile))


def _add(total: Array, part: Array, starts: dict[int, int | Array]) -> Array:
    """Adds a part to the total at these places; an axis of size 1 in the total starts at 0."""
    at = [starts[n] if n in starts and total.shape[n] > 1 else 0 for n in range(total.ndim)]
    return lax.dynamic_update_slice(total, lax.dynamic_slice(total, at, part.shape) + part, at)


def _cotangents(problem: AttentionProblem, sums: _Gradients, lse: Array, delta: Array) -> AttentionProblem:
    """The gradient in the problem's own form; None where there is none."""
    sinks, bias, scale = problem.sinks, problem.bias, problem.traced_scale
    if sinks is not None:
        share = jnp.exp(sinks.reshape(problem.kv_heads, -1, 1).astype(lse.dtype) - lse)  # [B, Hkv, G, T]
        sinks = -(share * delta).sum((0, 3)).reshape(-1).astype(sinks.dtype)
    return AttentionProblem(
        query=sums.query.astype(problem.dtype),
        key=sums.key.astype(problem.dtype),
        value=sums.value.astype(problem.dtype),
        bias=None if bias is None or sums.bias is None else sums.bias.reshape(bias.shape).astype(bias.dtype),
        sinks=sinks,
        traced_scale=None if scale is None or sums.scale is None else sums.scale.astype(scale.dtype),
        **problem.static_fields,
    )


_attend.defvjp(_attend_fwd, _attend_bwd)
