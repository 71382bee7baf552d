"""The other axis of a gated one, as `gated_axis` and `weak_axis` read it: its rows, and its scores in block order.

In block order row r is chunk row (r % 8) * 8 + r // 8. Scores are symmetric there, and those inside blocks of 8 rows lie apart.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ejkernel.kernels._triton.linear.kernels.tiles import chunk_at, dot, load_rows, program_at, store_split


@triton.jit
def block_row(r):
    """The chunk row of row r in block order."""
    return (r & 7) * 8 + (r >> 3)


@triton.jit
def rows_in_blocks(
    x, token, rows, head, col, HEADS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, SIGN: tl.constexpr, EVEN: tl.constexpr
):  # fmt: skip
    """[64, BD] of x [tokens, HEADS, D] in block order; 0 outside."""
    row = block_row(tl.arange(0, 64))[:, None]
    c = col + tl.arange(0, BD)[None, :]
    at = x + (token * HEADS + head) * D + (row * (SIGN * HEADS * D) + c)
    if EVEN and D % BD == 0:
        return tl.load(at)
    else:
        return tl.load(at, mask=(row < rows) & (c < D), other=0.0)


@triton.jit
def other_rows(
    x, token, rows, index, head, col, IN_BLOCKS: tl.constexpr, H: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr,
    P: tl.constexpr, BD: tl.constexpr, SIGN: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """[64, BD] of the other axis: of x [tokens, HEADS, D], or, with P > 0, of matrix `index` of gated rows [matrices, 64, P].

    In chunk order, or IN_BLOCKS. How an address is summed is each kernel's own, since it decides about registers.
    """
    if P > 0 and IN_BLOCKS:
        row = block_row(tl.arange(0, 64))[:, None]
        return tl.load(x + index * (64 * P) + (row * P + col + tl.arange(0, BD)[None, :]))
    elif P > 0:
        return tl.load(x + index * (64 * P) + (tl.arange(0, 64)[:, None] * P + (col + tl.arange(0, BD))[None, :]))
    elif IN_BLOCKS:
        return rows_in_blocks(x, token, rows, head // (H // HEADS), col, HEADS, D, BD, SIGN, EVEN)
    else:
        return load_rows(x, token, rows, head // (H // HEADS), col, HEADS, D, 64, BD, SIGN, EVEN)


@triton.jit
def scores_in_blocks(
    x, y, chunks, weak, scale, T, NT,
    M, within_blocks,
    H: tl.constexpr, HX: tl.constexpr, HY: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, SIGN: tl.constexpr,
    EVEN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Programs: chunks * heads. M [chunks, H, 64, 64] in block order: scale * x_t . y_s for s <= t, and the same at (s, t).

    Nothing for chunks that are `weak` [chunks, H].

    within_blocks [chunks, H, 8, 8, 8], float32: element [b, s, t] is the score of rows (t, s) of block b.
    """
    C: tl.constexpr = 64
    _, head, s = program_at(1, H)
    token, rows, _ = chunk_at(chunks, s, T, NT, C, SIGN)
    if rows <= 0:
        return
    if tl.load(weak + s.to(tl.int64) * H + head) == 1:
        return
    r = tl.arange(0, C)
    row = block_row(r)
    lower = tl.zeros([C, C], tl.float32)
    upper = tl.zeros([C, C], tl.float32)
    for col in range(0, D, BD):
        bx = rows_in_blocks(x, token, rows, head // (H // HX), col, HX, D, BD, SIGN, EVEN)
        by = rows_in_blocks(y, token, rows, head // (H // HY), col, HY, D, BD, SIGN, EVEN)
        lower = dot(bx, tl.trans(by), lower, M.dtype.element_ty, PREC)
        upper = dot(by, tl.trans(bx), upper, M.dtype.element_ty, PREC)
    scores = tl.where(row[:, None] >= row[None, :], lower, upper) * scale
    _store_scores(M, within_blocks, s.to(tl.int64) * H + head, scores, 1)


@triton.jit
def _store_scores(M, within_blocks, index, scores, SPLIT: tl.constexpr):
    r = tl.arange(0, 64)
    row = block_row(r)
    store_split(M, index * SPLIT, 4096, r[:, None] * 64 + r[None, :], scores, SPLIT)
    at = within_blocks + index * 512 + ((r & 7) * 64 + (r >> 3))[:, None] + ((r >> 3) * 8)[None, :]
    tl.store(at, scores, mask=((r & 7)[:, None] == (r & 7)[None, :]) & (row[:, None] >= row[None, :]))


@triton.jit
def stored_scores_in_blocks(A, A_low, chunks, weak, scale, T, NT, M, within_blocks, H: tl.constexpr, SIGN: tl.constexpr):
    """Programs: chunks * heads. `scale` times the scores of `gated_rows` [chunks, H, 64, 64], as `scores_in_blocks` leaves its.

    But M is [chunks, H, 2, 64, 64]: high and low part.
    """
    _, head, s = program_at(1, H)
    _, rows, _ = chunk_at(chunks, s, T, NT, 64, SIGN)
    if rows <= 0:
        return
    index = s.to(tl.int64) * H + head
    if tl.load(weak + index) == 1:
        return
    row = block_row(tl.arange(0, 64))
    later = tl.maximum(row[:, None], row[None, :])
    sooner = tl.minimum(row[:, None], row[None, :])
    at = index * 4096 + (later * 64 + sooner)
    _store_scores(M, within_blocks, index, (tl.load(A + at).to(tl.float32) + tl.load(A_low + at).to(tl.float32)) * scale, 2)
