"""Scores of chunks with one decay per key channel: N[t, s] = sum_c q[t, c] D[t, s, c] k[s, c], M likewise with k for q.

D[t, s, c] is never formed. At the one tree level where t lies in the right and s in the left half of a 2h-block it is
pre[t, c] suf[s, c] (`_products`), so the level's part of N and M is one product of rows q pre, k pre with rows k suf. Up to
tiles of 16 rows whole tiles are multiplied and the level's pairs are kept; above, right halves meet left halves.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._xla.gated_delta_rule._chunk import Scores, ScoresGrads
from ejkernel.kernels._xla.gated_delta_rule._triangular import (
    TILE,
    diagonal_blocks,
    grown,
    level_pairs,
    lower_blocks,
    masked,
)  # fmt: skip
from ejkernel.kernels._xla.linear._products import Array, Level, Matmul, aligned, halves, joined, levels, push_down


def scores(mm: Matmul, q: Array, k: Array, decay: Array) -> tuple[Scores, list[Level]]:
    """The scores of rows and decays `[..., C, K]`, and the levels of the tree, which `gradients` takes again."""
    rows, tile = q.shape[-2], min(TILE, q.shape[-2])
    tree = list(levels(decay, rows))
    diagonal = mm.row_sums(q * k)  # [..., C, 1]
    diagonal = _tiled(diagonal, tile)  # [..., C/tile, tile, 1]
    N = diagonal * aligned(np.eye(tile), diagonal)  # [..., C/tile, tile, tile]
    M = jnp.zeros_like(N)
    for level in tree[:-1]:
        h = level.h
        if h < tile:
            both = jnp.concatenate([_tiled(level.right(q), tile), _tiled(level.right(k), tile)], -2)  # [..., 2 tile, K]
            part = mm.nt(both, _tiled(level.left(k), tile))  # [..., C/tile, 2 tile, tile]
            N = N + masked(part[..., :tile, :], level_pairs(h, tile))
            M = M + masked(part[..., tile:, :], level_pairs(h, tile))
        else:
            both = jnp.concatenate([halves(level.right(q), h)[1], halves(level.right(k), h)[1]], -2)  # [..., C/2h, 2h, K]
            part = mm.nt(both, halves(level.left(k), h)[0])  # [..., C/2h, 2h, h]
            N = grown(N[..., 0::2, :, :], part[..., :h, :], N[..., 1::2, :, :])
            M = grown(M[..., 0::2, :, :], part[..., h:, :], M[..., 1::2, :, :])
    whole = tree[-1]
    assert whole.pre is not None
    found = Scores(
        N[..., 0, :, :], M[..., 0, :, :], whole.right(q), whole.right(k), whole.left(k), whole.pre[..., -1, :, None]
    )  # fmt: skip
    return found, tree


def gradients(mm: Matmul, q: Array, k: Array, s: Scores, tree: list[Level], d: ScoresGrads) -> tuple[Array, Array, Array]:
    """(dq, dk, gradient of the log decays `[..., C, K]`)."""
    rows, tile = q.shape[-2], min(TILE, q.shape[-2])
    whole = tree[-1]
    on_diagonal = jnp.diagonal(d.N, axis1=-2, axis2=-1)[..., None]  # [..., C, 1]
    dq, dk = on_diagonal * k + whole.right(d.qP), on_diagonal * q + whole.right(d.kP) + whole.left(d.ks)
    dN_tiles, dM_tiles = diagonal_blocks(d.N, tile), diagonal_blocks(d.M, tile)
    at_level: dict[int, Array] = {}
    for level in tree[:-1]:
        h = level.h
        right_q, right_k, left_k = level.right(q), level.right(k), level.left(k)
        if h < tile:
            pairs = level_pairs(h, tile)
            dscores = jnp.concatenate([masked(dN_tiles, pairs), masked(dM_tiles, pairs)], -2)  # [..., C/tile, 2 tile, tile]
            both = jnp.concatenate([_tiled(right_q, tile), _tiled(right_k, tile)], -2)
            dright = mm.nn(dscores, _tiled(left_k, tile))  # [..., C/tile, 2 tile, K]
            dleft = mm.tn(dscores, both).reshape(k.shape)
            dright_q, dright_k = (x.reshape(q.shape) for x in (dright[..., :tile, :], dright[..., tile:, :]))
        else:
            dscores = jnp.concatenate([lower_blocks(d.N, h), lower_blocks(d.M, h)], -2)  # [..., C/2h, 2h, h]
            both = jnp.concatenate([halves(right_q, h)[1], halves(right_k, h)[1]], -2)
            dright = mm.nn(dscores, halves(left_k, h)[0])  # [..., C/2h, 2h, K]
            dleft = mm.tn(dscores, both)  # [..., C/2h, h, K]
            zero = jnp.zeros_like(dleft)
            dright_q, dright_k = joined(zero, dright[..., :h, :]), joined(zero, dright[..., h:, :])
            dleft = joined(dleft, zero)
        dq = dq + level.right(dright_q)
        dk = dk + level.right(dright_k) + level.left(dleft)
        # Right rows have an adjoint of pre alone and left rows one of suf alone: what is not theirs is zero.
        at_level[h] = dright_q * right_q + dright_k * right_k + dleft * left_k
    last = (np.arange(rows) == rows - 1)[:, None]
    dpre = d.qP * s.qP + d.kP * s.kP + masked(d.total[..., None, :], last)
    return dq, dk, push_down(at_level, dpre, d.ks * s.ks)


def _tiled(x: Array, tile: int) -> Array:
    """`[..., C, D]` as `[..., C / tile, tile, D]`."""
    return x.reshape(*x.shape[:-2], x.shape[-2] // tile, tile, x.shape[-1])
