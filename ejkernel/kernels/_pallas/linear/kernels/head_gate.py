"""Chunks whose decay is one number per token and head, or none.

    S' = w S + (k * suf)^T v                           w: product of the chunk's decays
    o  = scale * (((q k^T) * D) v + pre * (q S))       D[t, s]: product of the decays after s up to t; 0 for s > t

A block holds several heads, which are independent, so the compiler fills one's latencies with the others' work.

D is exp of sums of log decays over (s, t]. A product with a triangle of ones adds up each of these sums by itself, so that
strong gates neither cancel nor overflow. It does so inside blocks of `LANES` rows. Between two blocks the sum is what follows s
in its block, the blocks between, and what t's block has up to t. Where the chunk's log decays stay small (`WEAK`) and operands
are bfloat16 anyway, the difference of two prefix sums is as good and cheaper. The same holds for the gate's gradient: sums over
the rectangles t >= r > s by a product, or rows less columns.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels._pallas._chips import LANES
from ejkernel.kernels._pallas._launch import Input, Output, Refs
from ejkernel.kernels._pallas._products import LEAST_LOG, Products, column_sums, positions, row_sums
from ejkernel.kernels._pallas.linear._plan import Blocks
from ejkernel.kernels._pallas.linear.kernels.scan import Adjoints, Scan, Tokens, read_adjoint

Array = jax.Array
WEAK = 64.0  # the largest log decay of a whole chunk for differences: float32 is then off by 4e-6
COLUMNS = 4  # prefix sums, suffix sums, log decays, prefix sums inside blocks of rows
ROWS = 2  # prefix sums, suffix sums inside blocks of rows


class Decays(NamedTuple):
    """The log decays of a call in chunks, as columns and as rows, and which chunks are weakly gated."""

    columns: Array  # [B, blocks of heads, S, C, 3 * heads]
    rows: Array  # [B, blocks of heads, S, 2 * heads, C]
    weak: Array  # [B * blocks of heads * S]

    @classmethod
    def of(cls, blocks: Blocks, log: Array) -> Decays:
        """From log decays `[B, S * C, H]`. They are a number per token and head: XLA adds them up outside the kernels."""
        B, heads, S, C = blocks.batch, blocks.together, blocks.chunks, blocks.rows
        log = jnp.maximum(log.astype(jnp.float32), LEAST_LOG).reshape(B, S, C, -1, heads)
        log = jnp.moveaxis(log, 3, 1)  # [B, blocks of heads, S, C, heads]
        (prefix, suffix), (inner_prefix, inner_suffix) = _sums(log, C), _sums(log, block_of(C))
        weak = jnp.max(jnp.abs(prefix), axis=(3, 4)) <= WEAK
        columns = jnp.stack([prefix, suffix, log, inner_prefix], -1).reshape(*log.shape[:4], COLUMNS * heads)
        rows = jnp.stack([prefix, inner_suffix], -1).reshape(*log.shape[:4], ROWS * heads)
        return cls(columns, jnp.swapaxes(rows, 3, 4), weak.reshape(-1))

    def inputs(self, blocks: Blocks) -> dict[str, Input | None]:
        heads, C = blocks.together, blocks.rows
        return {
            "columns": Input(self.columns, blocks.per_chunk(C, COLUMNS * heads)),
            "rows": Input(self.rows, blocks.per_chunk(ROWS * heads, C)),
        }


def block_of(rows: int) -> int:
    """Rows of a block of a chunk: one vector register's width, or the whole chunk."""
    return LANES if rows % LANES == 0 else rows


def _sums(log: Array, rows: int) -> tuple[Array, Array]:
    """Sums of `[..., C, heads]` up to each row of a block of `rows`, and after it: the decay comes before the update."""
    inside = log.reshape(*log.shape[:-2], -1, rows, log.shape[-1])  # [..., blocks, rows, heads]
    axis = inside.ndim - 2
    after = jnp.pad(inside[..., 1:, :], [(0, 0)] * axis + [(0, 1), (0, 0)])
    return tuple(x.reshape(log.shape) for x in (jnp.cumsum(inside, axis=axis), lax.cumsum(after, axis=axis, reverse=True)))  # type: ignore[return-value]


class Decay(NamedTuple):
    """The decays of one head in one chunk; None without a gate."""

    matrix: Array  # [C, C]
    pre: Array | None = None  # [C, 1]
    suf: Array | None = None  # [C, 1]

    @property
    def whole(self) -> Array | None:
        return None if self.pre is None else self.pre[-1:]  # [1, 1]


def forward(tokens: Tokens, decays: Decays | None, initial: Array, keep: bool) -> tuple[Array, Array, Array | None]:
    """(output, final states, the state before each chunk if they are kept)."""
    return _scan(tokens, decays).forward(lambda refs: _forward(tokens, refs), initial, keep)


def backward(tokens: Tokens, decays: Decays | None, given: Adjoints) -> dict[str, Array]:
    """The gradients `dq`, `dk`, `dv` (for all H heads), `dinitial`, and with gates `dlog [B, S * C, H]`."""
    blocks = tokens.blocks
    B, N, S, C, heads = blocks.batch, blocks.grid[1], blocks.chunks, blocks.rows, blocks.together
    of_gates: dict[str, Output | None] = {
        "dcolumns": Output((B, N, S, C, COLUMNS * heads), jnp.float32, blocks.per_chunk(C, COLUMNS * heads)),
        "drows": Output((B, N, S, ROWS * heads, C), jnp.float32, blocks.per_chunk(ROWS * heads, C)),
    }
    made = _scan(tokens, decays).backward(lambda refs: _backward(tokens, refs), given, {} if decays is None else of_gates)
    if decays is not None:
        made["dlog"] = _log_gradient(blocks, made.pop("dcolumns"), made.pop("drows"))
    return made


def _scan(tokens: Tokens, decays: Decays | None) -> Scan:
    if decays is None:
        return Scan("head_gate", tokens, {}, {})
    return Scan("head_gate", tokens, decays.inputs(tokens.blocks), {"weak": decays.weak})


def _log_gradient(blocks: Blocks, columns: Array, rows: Array) -> Array:
    """`[B, S * C, H]` from what the kernel leaves to be added up along a chunk."""
    B, _, S, C, _ = columns.shape
    pre, suf, rectangles, inner_pre = (columns[..., i::COLUMNS] for i in range(COLUMNS))  # [B, N, S, C, heads]
    less, inner_suf = (jnp.swapaxes(rows[:, :, :, i::ROWS], 3, 4) for i in range(ROWS))
    found = rectangles + _pushed(pre - less, suf, C) + _pushed(inner_pre, inner_suf, block_of(C))
    return jnp.moveaxis(found, 1, 3).reshape(B, S * C, blocks.heads)


def _pushed(prefix: Array, suffix: Array, rows: int) -> Array:
    """The gradient of log decays from those of the two sums of `_sums`: row r takes prefixes t >= r and suffixes s < r."""
    inside = lambda x: x.reshape(*x.shape[:-2], -1, rows, x.shape[-1])
    axis = prefix.ndim - 1
    before = jnp.pad(inside(suffix)[..., :-1, :], [(0, 0)] * axis + [(1, 0), (0, 0)])
    return (lax.cumsum(inside(prefix), axis=axis, reverse=True) + jnp.cumsum(before, axis=axis)).reshape(prefix.shape)


def _for_each_kind(blocks: Blocks, refs: Refs, body: Any) -> None:
    """`body(weak)` as the chunk's gates ask for; only bfloat16 operands leave room for differences."""
    if "weak" not in refs or not blocks.plan.narrow:
        body(False)
        return
    b, n, c = (pl.program_id(axis) for axis in range(3))
    weak = refs["weak"][(b * blocks.grid[1] + n) * blocks.chunks + blocks.chunk(c)] != 0
    pl.when(weak)(lambda: body(True))
    pl.when(jnp.logical_not(weak))(lambda: body(False))


def _decay(blocks: Blocks, refs: Refs, head: int, weak: bool) -> Decay:
    C = blocks.rows
    t, s = positions(C, C)
    if "columns" not in refs:
        return Decay(jnp.where(t >= s, 1.0, 0.0))
    prefix, suffix, log, inner = (_column(refs["columns"], head, i) for i in range(COLUMNS))  # [C, 1]
    if weak:
        matrix = _decays_of(prefix - _row(refs["rows"], head, 0))
    else:
        matrix = _exact_matrix(blocks.plan.products, log, inner, _row(refs["rows"], head, 1))
    return Decay(matrix, jnp.exp(prefix), jnp.exp(suffix))


def _decays_of(between: Array) -> Array:
    """`[C, C]`: exp of the sums over s < r <= t, and 0 for s > t."""
    t, s = positions(*between.shape)
    return jnp.where(t >= s, jnp.exp(jnp.where(t >= s, between, 0.0)), 0.0)


def _exact_matrix(mm: Products, log: Array, prefix: Array, suffix: Array) -> Array:
    """The decays `[C, C]` by additions alone, from log decays `[C, 1]`, and their sums in blocks `[C, 1]` and `[1, C]`."""
    spans = _spans(log.shape[0])
    t, s = positions(spans[0].stop, spans[0].stop)
    rows = []
    for i, own in enumerate(spans):
        between = prefix[own]  # [b, 1]: from the end of block j to t
        row = [_decays_of(mm.sums(t >= s, jnp.where(t > s, log[own], 0.0)))]
        for j in reversed(range(i)):
            row.insert(0, jnp.exp(between + suffix[:, spans[j]]))
            between += prefix[spans[j].stop - 1 : spans[j].stop]
        rows.append(jnp.concatenate([*row, *[jnp.zeros(t.shape, jnp.float32)] * (len(spans) - 1 - i)], axis=1))
    return jnp.concatenate(rows, axis=0)


def _exact_gradient(mm: Products, d: Array) -> tuple[Array, Array, Array]:
    """From `d [C, C]`, the decays' adjoints times the decays: of log decays and prefixes `[C, 1]`, and of suffixes `[1, C]`."""
    spans = _spans(d.shape[0])
    zero = lambda *shape: jnp.zeros(shape, jnp.float32)
    size = spans[0].stop
    t, s = positions(size, size)
    last = lax.broadcasted_iota(jnp.int32, (size, 1), 0) == size - 1
    logs = [row_sums(jnp.where(t > s, mm.sums(t >= s, d[own, own], transposed=True), 0.0)) for own in spans]  # t >= r > s
    prefixes, suffixes = [zero(size, 1) for _ in spans], [zero(1, size) for _ in spans]
    for i, own in enumerate(spans):
        for j in range(i):
            block = d[own, spans[j]]  # [b, b]
            of_rows = row_sums(block)  # [b, 1]
            prefixes[i] += of_rows
            suffixes[j] += column_sums(block)
            for between in range(j + 1, i):
                prefixes[between] += jnp.where(last, column_sums(of_rows), 0.0)
    return jnp.concatenate(logs), jnp.concatenate(prefixes), jnp.concatenate(suffixes, axis=1)


def _spans(rows: int) -> list[slice]:
    size = block_of(rows)
    return [slice(first, first + size) for first in range(0, rows, size)]


def _row(ref: Any, head: int, which: int) -> Array:
    place = head * ROWS + which
    return ref[0, 0, 0, place : place + 1, :]  # [1, C]


def _column(ref: Any, head: int, which: int) -> Array:
    place = head * COLUMNS + which
    return ref[0, 0, 0, :, place : place + 1]  # [C, 1]


def _scaled(x: Array, factor: Array | None) -> Array:
    return x if factor is None else x * factor


def _forward(tokens: Tokens, refs: Refs) -> None:
    blocks, S_ref, mm = tokens.blocks, refs["S"], tokens.blocks.plan.products

    def heads(weak: bool) -> None:
        for h in range(blocks.together):
            q, k, v = tokens.read(refs, h)  # [C, K], [C, K], [C, V]
            S, decay = S_ref[h], _decay(blocks, refs, h, weak)  # [K, V]
            scores = mm.nt(q, k) * decay.matrix  # [C, C]
            o = mm.nn(scores, v) + _scaled(mm.nn(q, S), decay.pre)  # [C, V]
            blocks.write(refs["output"], h, o * blocks.plan.scale)
            S_ref[h] = _scaled(S, decay.whole) + mm.tn(k, _scaled(v, decay.suf))

    _for_each_kind(blocks, refs, heads)


def _backward(tokens: Tokens, refs: Refs) -> None:
    def heads(weak: bool) -> None:
        for h in range(tokens.blocks.together):
            _backward_head(tokens, refs, h, weak)

    _for_each_kind(tokens.blocks, refs, heads)


def _backward_head(tokens: Tokens, refs: Refs, h: int, weak: bool) -> None:
    blocks, mm = tokens.blocks, tokens.blocks.plan.products
    q, k, v = tokens.read(refs, h)  # [C, K], [C, K], [C, V]
    do = read_adjoint(blocks, refs, h)  # [C, V]
    S, dS, decay = refs["starts"][0, 0, h], refs["dS"][h], _decay(blocks, refs, h, weak)  # [K, V]
    raw = mm.nt(q, k)  # [C, C]
    dA = mm.nt(do, v) * decay.matrix  # [C, C]
    dx, dy = mm.nt(do, S), mm.nt(v, dS)  # [C, K] adjoints of q pre and k suf, before their factors
    blocks.write(refs["dq"], h, mm.nn(dA, k) + _scaled(dx, decay.pre))
    blocks.write(refs["dk"], h, mm.tn(dA, q) + _scaled(dy, decay.suf))
    blocks.write(refs["dv"], h, mm.tn(raw * decay.matrix, do) + _scaled(mm.nn(k, dS), decay.suf))
    refs["dS"][h] = _scaled(dS, decay.whole) + mm.tn(q, _scaled(do, decay.pre))
    if decay.pre is None or decay.suf is None:
        return
    # The decay of row r is a factor of every D[t, s] with s < r <= t, of pre[t] with t >= r and of suf[s] with s < r.
    C = blocks.rows
    from_scores = raw * dA  # [C, C]
    through = column_sums(row_sums(S * dS)) * decay.pre[-1:]  # [1, 1]
    row = lax.broadcasted_iota(jnp.int32, (C, 1), 0)
    from_pre = row_sums(dx * q) * decay.pre + jnp.where(row == C - 1, through, 0.0)  # [C, 1]
    from_suf = row_sums(dy * k) * decay.suf  # [C, 1]
    if weak:
        from_pre += row_sums(from_scores)
        rectangles = inner_pre = jnp.zeros_like(from_pre)  # [C, 1]
        less, inner_suf = column_sums(from_scores), jnp.zeros((1, C), jnp.float32)  # [1, C]
    else:
        rectangles, inner_pre, inner_suf = _exact_gradient(mm, from_scores)
        less = jnp.zeros((1, C), jnp.float32)
    for i, x in enumerate((from_pre, from_suf, rectangles, inner_pre)):
        refs["dcolumns"][0, 0, 0, :, h * COLUMNS + i : h * COLUMNS + i + 1] = x
    for i, x in enumerate((less, inner_suf)):
        refs["drows"][0, 0, 0, h * ROWS + i : h * ROWS + i + 1, :] = x
