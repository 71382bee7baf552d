"""M chunks side by side with decays per key channel (rows of the state), per value channel (columns), or both.

    S' = a_C S b_C + (k * suf_a)^T (v * suf_b)            a, b: products of the chunk's row and column decays
    o_t = pre_b[t] * ((q_t * pre_a[t]) S)  +  what the chunk's own rows s <= t give

Rows s < t meet at the tree level where t is in the right and s in the left half of a block (`_products`):
o_t += pre_b[t] * ((q_t pre_a[t]) . (k_s suf_a[s])) * (v_s suf_b[s]). Up to tiles of 16 rows a level is one product P P^T of
an operand whose right rows are q pre and whose left rows are k suf, masked to the level's pairs; above, right halves times
left halves. The backward pass has the same shape with (q, k, a) and (do, v, b) in each other's place. A missing gate is None.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._xla.linear._products import (
    Array,
    Level,
    Matmul,
    aligned,
    halves,
    is_right,
    joined,
    levels,
    pass_on,
    push_down,
)

TILE = 16


class GatedGrads(NamedTuple):
    """Gradients of the chunks' rows; those of the gates are with respect to their logarithms."""

    dq: Array  # [..., C, K]
    dk: Array  # [..., C, K]
    dv: Array  # [..., C, V]
    da: Array | None  # [..., C, K]
    db: Array | None  # [..., C, V]


def forward(mm: Matmul, S: Array, q: Array, k: Array, v: Array, a: Array | None, b: Array | None) -> tuple[Array, Array]:
    """(state after the chunks `[..., K, V]`, output `[..., M, C, V]`) from the state before and rows `[..., M, C, D]`.

    a, b are the decays themselves.
    """
    rows, tile = q.shape[-2], min(TILE, q.shape[-2])
    scores = _tiled(mm.nt, q, k, tile)
    scores = scores * aligned(np.eye(tile), scores)  # [..., C/tile, tile, tile]: the diagonal, then levels that share v
    outputs = []
    for row, column in zip(levels(a, rows), levels(b, rows), strict=True):
        h = row.h
        if h == rows:
            break
        if h < tile:
            P = _mixed(row, q, k)  # [..., C, K]
            level = _tiled(mm.nt, P, P, tile)
            level = level * aligned(_pairs(h, tile), level)  # [..., C/tile, tile, tile]
            if b is None:
                scores += level
            else:
                outputs.append(column.right(_times_tiled(mm, level, column.left(v))))
        else:
            (_, x), (y, _), (z, _) = halves(row.right(q), h), halves(row.left(k), h), halves(column.left(v), h)
            part = mm.nn(mm.nt(x, y), z)  # [..., C/2h, h, V]
            outputs.append(column.right(joined(jnp.zeros_like(part), part)))
    output = sum(outputs, _times_tiled(mm, scores, v))
    entering, S = pass_on(S, mm.tn(row.left(k), column.left(v)), _totals(row, column))
    return S, output + column.right(mm.nn(row.right(q), entering))


def backward(
    mm: Matmul, S: Array, dS: Array, q: Array, k: Array, v: Array, a: Array | None, b: Array | None, do: Array
) -> tuple[Array, GatedGrads]:
    """(adjoint of the state before the chunks, gradients of their rows) from those of the state after them and the output."""
    rows, tile = q.shape[-2], min(TILE, q.shape[-2])
    dov = _tiled(mm.nt, do, v, tile)  # [..., C/tile, tile, tile]
    z, n = mm.row_sums(do * v), mm.row_sums(q * k)  # [..., C, 1]
    grads = GatedGrads(dq=z * k, dk=z * q, dv=n * do, da=None, db=None)
    lower = aligned(np.tril(np.ones((tile, tile), bool), -1), dov, bool)
    both = None if b is not None else jnp.where(lower, dov, jnp.swapaxes(dov, -1, -2))  # do_t . v_s for both (t, s) and (s, t)
    row_adjoints: dict[int, Array] = {}
    column_adjoints: dict[int, Array] = {}
    for row, column in zip(levels(a, rows), levels(b, rows), strict=True):
        h = row.h
        if h == rows:
            break
        P, Pv = _mixed(row, q, k), _mixed(column, do, v)  # [..., C, K], [..., C, V]
        if h < tile:
            pairs = aligned(_pairs(h, tile) + _pairs(h, tile).T, dov)
            Y = (_tiled(mm.nt, Pv, Pv, tile) if both is None else both) * pairs  # [..., C/tile, tile, tile]
            X = _tiled(mm.nt, P, P, tile) * pairs
            dP, dPv = _times_tiled(mm, Y, P), _times_tiled(mm, X, Pv)  # [..., C, K], [..., C, V]
        else:
            (w, x), (wv, xv) = halves(P, h), halves(Pv, h)  # [..., C/2h, h, K], [..., C/2h, h, V]
            Y, X = mm.nt(xv, wv), mm.nt(x, w)  # [..., C/2h, h, h]
            dP = joined(mm.tn(Y, x), mm.nn(Y, w))
            dPv = joined(mm.tn(X, xv), mm.nn(X, wv))
        right = aligned(is_right(h, rows), dP, bool)
        grads = grads._replace(
            dq=grads.dq + jnp.where(right, row.right(dP), 0),
            dk=grads.dk + jnp.where(right, 0, row.left(dP)),
            dv=grads.dv + jnp.where(right, 0, column.left(dPv)),
        )
        row_adjoints[h], column_adjoints[h] = dP * P, dPv * Pv
    x, w, xv, wv = row.right(q), row.left(k), column.right(do), column.left(v)
    Ss, _ = pass_on(S, mm.tn(w, wv), _totals(row, column))
    dSs, dS = pass_on(dS, mm.tn(x, xv), _totals(row, column), backwards=True)
    dx, dw, dwv = mm.nt(xv, Ss), mm.nt(wv, dSs), mm.nn(w, dSs)  # [..., C, K], [..., C, K], [..., C, V]
    through = math.prod((f for f in _totals(row, column) if f is not None), start=Ss) * dSs  # [..., M, K, V]
    last = aligned((np.arange(rows) == rows - 1)[:, None], dx, bool)
    if a is not None:
        total = jnp.where(last, jnp.swapaxes(mm.row_sums(through), -1, -2), 0)
        grads = grads._replace(da=push_down(row_adjoints, dx * x + total, dw * w))
    if b is not None:
        total = jnp.where(last, jnp.sum(through, -2)[..., None, :], 0)
        grads = grads._replace(db=push_down(column_adjoints, mm.nn(x, Ss) * xv + total, dwv * wv))
    grads = grads._replace(dq=grads.dq + row.right(dx), dk=grads.dk + row.left(dw), dv=grads.dv + column.left(dwv))
    return dS, grads


def _mixed(level: Level, right: Array, left: Array) -> Array:
    """Right rows of the level's blocks from `right` * pre, left rows from `left` * suf: `[..., C, D]`."""
    is_of_right = aligned(is_right(level.h, right.shape[-2]), right, bool)
    return jnp.where(is_of_right, level.right(right), level.left(left))


def _pairs(h: int, tile: int) -> np.ndarray:
    """`[tile, tile]`: 1 where t is in the right and s in the left half of the same 2h-block."""
    t, s = np.arange(tile)[:, None], np.arange(tile)[None, :]
    return ((t // h % 2 == 1) & (s // h == t // h - 1)).astype(np.float32)


def _tiled(product: Callable[[Array, Array], Array], x: Array, y: Array, tile: int) -> Array:
    """`product` of the tiles of `[..., C, D]` arrays: `[..., C / tile, tile, tile]`."""
    split = lambda z: z.reshape(*z.shape[:-2], z.shape[-2] // tile, tile, z.shape[-1])
    return product(split(x), split(y))


def _times_tiled(mm: Matmul, scores: Array, x: Array) -> Array:
    """Block-diagonal `scores [..., C / tile, tile, tile]` times `x [..., C, D]`."""
    return mm.nn(scores, x.reshape(*scores.shape[:-1], x.shape[-1])).reshape(x.shape)


def _totals(row: Level, column: Level) -> list[Array | None]:
    """Whole chunks' decays of the state's rows `[..., K, 1]` and columns `[..., 1, V]`."""
    return [
        None if row.pre is None else row.pre[..., -1, :, None],
        None if column.pre is None else column.pre[..., -1, None, :],
    ]


__all__ = ["GatedGrads", "backward", "forward"]
