"""The opposite pairs of a side as `_side` reads them: in tile order and symmetric, and those inside blocks of 8 rows apart.

Tile row r is chunk row (r % 8) * 8 + r // 8.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ejkernel.kernels._triton.recurrent._tiles import dot, program_at, slot_at, store_halves


@triton.jit
def block_row(r):
    """The chunk row of tile row r."""
    return (r & 7) * 8 + (r >> 3)


@triton.jit
def pairs_of_plain(
    x, y, slots, mild, scale, T, NT,
    M, near,
    H: tl.constexpr, HX: tl.constexpr, HY: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, SIGN: tl.constexpr,
    EVEN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Programs: slots * heads. M [slots, H, 64, 64] in tile order: scale * x_t . y_s for s <= t, and the same at (s, t).

    Nothing for chunks that are `mild` [slots, H].

    near [slots, H, 8, 8, 8], float32: element [b, s, t] is the pair (t, s) inside block b.
    """
    C: tl.constexpr = 64
    _, head, s = program_at(1, H)
    token, rows, _ = slot_at(slots, s, T, NT, C, SIGN)
    if rows <= 0:
        return
    if tl.load(mild + s.to(tl.int64) * H + head) == 1:
        return
    r = tl.arange(0, C)
    row = block_row(r)
    lower = tl.zeros([C, C], tl.float32)
    upper = tl.zeros([C, C], tl.float32)
    for col in range(0, D, BD):
        bx = permuted(x, token, rows, head // (H // HX), col, HX, D, BD, SIGN, EVEN)
        by = permuted(y, token, rows, head // (H // HY), col, HY, D, BD, SIGN, EVEN)
        lower = dot(bx, tl.trans(by), lower, M.dtype.element_ty, PREC)
        upper = dot(by, tl.trans(bx), upper, M.dtype.element_ty, PREC)
    _store_pairs(M, near, s.to(tl.int64) * H + head, tl.where(row[:, None] >= row[None, :], lower, upper) * scale, 1)


@triton.jit
def _store_pairs(M, near, index, both, HALVES: tl.constexpr):
    r = tl.arange(0, 64)
    row = block_row(r)
    store_halves(M, index * HALVES, 4096, r[:, None] * 64 + r[None, :], both, HALVES)
    at = near + index * 512 + ((r & 7) * 64 + (r >> 3))[:, None] + ((r >> 3) * 8)[None, :]
    tl.store(at, both, mask=((r & 7)[:, None] == (r & 7)[None, :]) & (row[:, None] >= row[None, :]))


@triton.jit
def pairs_of_gated(A, rest, slots, mild, scale, T, NT, M, near, H: tl.constexpr, SIGN: tl.constexpr):
    """Programs: slots * heads. `scale` times the pairs of `_key.prepare` [slots, H, 64, 64], as `pairs_of_plain` leaves its.

    But M is [slots, H, 2, 64, 64], in two halves.
    """
    _, head, s = program_at(1, H)
    _, rows, _ = slot_at(slots, s, T, NT, 64, SIGN)
    if rows <= 0:
        return
    index = s.to(tl.int64) * H + head
    if tl.load(mild + index) == 1:
        return
    row = block_row(tl.arange(0, 64))
    later = tl.maximum(row[:, None], row[None, :])
    sooner = tl.minimum(row[:, None], row[None, :])
    at = index * 4096 + (later * 64 + sooner)
    _store_pairs(M, near, index, (tl.load(A + at).to(tl.float32) + tl.load(rest + at).to(tl.float32)) * scale, 2)


@triton.jit
def permuted(
    x, token, rows, head, col, HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, SIGN: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """[64, BD] of x [tokens, HEADS, D] in tile order; 0 outside."""
    row = block_row(tl.arange(0, 64))[:, None]
    c = col + tl.arange(0, BD)[None, :]
    at = x + (token * HEADS + head) * D + (row * (SIGN * HEADS * D) + c)
    if EVEN and D % BD == 0:
        return tl.load(at)
    else:
        return tl.load(at, mask=(row < rows) & (c < D), other=0.0)
