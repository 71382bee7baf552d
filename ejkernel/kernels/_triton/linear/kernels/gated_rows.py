"""What a scan feeds to tensor cores unchanged, of chunks with a decay per channel: exact for every gate, bfloat16, 64 rows.

`gated_rows` reads q, k and the gate once and leaves, per chunk, q * pre (scaled), k * suf, the chunk's decay and the
intra-chunk scores A. Its dyadic tree is in registers: decays are multiplied, one exponential per element, and since at each
level odd blocks hold queries and even blocks keys, one operand P serves both: scores of a level = P P^T. Levels inside 16 rows
are 16 x 16 products of one warp, the last two levels whole tiles. Of a gate per value channel it makes the same, of do and v.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ejkernel.kernels._triton.linear.kernels.tiles import (
    all_weak,
    chunk_at,
    dot,
    exp_of_log,
    low_part,
    program_at,
    store_split,
)


@triton.jit
def _mul(a, b):
    return a * b


@triton.jit
def upper_half(AXIS: tl.constexpr):
    """True on the upper half of an axis of a [2, 2, 2, 2, 2, 2, BK] tensor."""
    b = tl.arange(0, 2) == 1
    if AXIS == 0:
        b = b[:, None, None, None, None, None, None]
    elif AXIS == 1:
        b = b[None, :, None, None, None, None, None]
    elif AXIS == 2:
        b = b[None, None, :, None, None, None, None]
    elif AXIS == 3:
        b = b[None, None, None, :, None, None, None]
    elif AXIS == 4:
        b = b[None, None, None, None, :, None, None]
    else:
        b = b[None, None, None, None, None, :, None]
    return b


@triton.jit
def double(total, AXIS: tl.constexpr):
    """From blocks of h rows to blocks of 2h, `total` holds each block's decay (axes below the level have size 1): what the
    decays up to each row and those after it are multiplied by, and the totals of the larger blocks."""
    b = upper_half(AXIS)
    left = tl.reduce(tl.where(b, 1.0, total), AXIS, _mul, keep_dims=True)
    right = tl.reduce(tl.where(b, total, 1.0), AXIS, _mul, keep_dims=True)
    return tl.where(b, left, 1.0), tl.where(b, 1.0, right), left * right


@triton.jit
def _store_both_parts(A, A_low, at, value, mask):
    rounded = value.to(A.dtype.element_ty)
    tl.store(A + at, rounded, mask=mask)
    if A_low is not None:
        tl.store(A_low + at, low_part(value, rounded), mask=mask)


@triton.jit
def store_scores(A, A_low, index, diagonal, others, ABOVE: tl.constexpr):
    """Writes the 16 x 16 blocks of scores [64, 64] on the diagonal, from [4, 16, 16], and the others, from [64, 64].

    ABOVE: those above the diagonal, too.
    """
    r = tl.arange(0, 16)
    at = tl.arange(0, 4)[:, None, None] * (16 * 65) + (r[:, None] * 64 + r[None, :])[None, :, :]
    _store_both_parts(A, A_low, index * 4096 + at, diagonal, None)
    # as [32, 128]: a [64, 64] store would share its vector width with the [64, BK] loads (coalescing pass)
    row = tl.arange(0, 32)[:, None]
    column = tl.arange(0, 128)[None, :]
    block, block_of_column = row // 8, (column % 64) // 16
    if ABOVE:
        wanted = block != block_of_column
    else:
        wanted = block > block_of_column
    wanted = tl.max_constancy(wanted, [8, 16])  # so that 8 at a time are stored
    _store_both_parts(A, A_low, index * 4096 + (row * 128 + column), tl.reshape(others, [32, 128]), wanted)


@triton.jit(noinline=True)
def _rows_of_chunk(
    q, k, g, gs, gamma, token, rows, seq, head, index, scale,
    A, A_low, qd, kd, chunk_decay, block_decays,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HG: tl.constexpr, HGS: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, BK: tl.constexpr, SIGN: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """`gated_rows` of one chunk. A call of its own: inlined into the loop over chunks, every address that the chunks have in
    common is kept in a register across it, and 656 bytes are spilled for 8."""
    C: tl.constexpr = 64
    DT: tl.constexpr = kd.dtype.element_ty
    PT: tl.constexpr = tl.float32 if SPLIT == 2 else DT  # of the tree's operands, multiplied as tf32
    VEC: tl.constexpr = BK // 32
    # Tile row r is chunk row (r % 4) * 16 + r // 4.  With 4 warps and VEC = BK / 32 columns a thread, the compiler's
    # blocked layout then gives warp w the rows 16w..16w+15, all 16 in the same thread: levels 0-3 touch registers only.
    r = tl.arange(0, C)
    chunk_row = (r & 3) * 16 + (r >> 2)
    c = tl.arange(0, BK)
    c = ((c // VEC) * VEC + c % VEC)[None, :]  # = c, but hides contiguity beyond VEC from the coalescing pass
    cq = c + ((r & 3) * (16 * SIGN * HQ * K))[:, None]
    ck = c + ((r & 3) * (16 * SIGN * HK * K))[:, None]
    cg = c + ((r & 3) * (16 * SIGN * HG * K))[:, None]
    cd = c + ((r & 3) * (16 * KP))[:, None]
    oq = ((r >> 2) * (SIGN * HQ * K))[:, None]  # added last: a constant for each register, so an immediate offset
    ok = ((r >> 2) * (SIGN * HK * K))[:, None]
    og = ((r >> 2) * (SIGN * HG * K))[:, None]
    od = ((r >> 2) * KP)[:, None]
    inside = (chunk_row < rows)[:, None]
    if q is not None:
        q += (token * HQ + head // (H // HQ)) * K
    k += (token * HK + head // (H // HK)) * K
    g += (token * HG + head // (H // HG)) * K
    x = r[:, None] ^ r[None, :]
    r16 = tl.arange(0, 16)
    x16 = (r16[:, None] ^ r16[None, :])[None, :, :]
    acc16 = tl.zeros([4, 16, 16], tl.float32)  # the four diagonal 16x16 blocks of A: diagonal and levels 0-3
    acc = tl.zeros([C, C], tl.float32)  # everything else: levels 4 and 5
    for ik in range(0, KP, BK):
        if EVEN and K == KP:
            if q is not None:
                bq = tl.load(q + ik + cq + oq)
            bk = tl.load(k + ik + ck + ok)
            bg = tl.load(g + ik + cg + og)
        else:
            if K == KP:
                m = inside
            else:
                m = inside & (ik + tl.arange(0, BK)[None, :] < K)
            if q is not None:
                bq = tl.load(q + ik + cq + oq, mask=m, other=0.0)
            bk = tl.load(k + ik + ck + ok, mask=m, other=0.0)
            bg = tl.load(g + ik + cg + og, mask=m, other=0.0)
        bg = bg.to(tl.float32)
        if (gs is not None) or (gamma is not None):
            total = tl.zeros([C], tl.float32)
            if gs is not None:
                at = gs + token * HGS + head // (H // HGS) + chunk_row * (SIGN * HGS)
                total += tl.load(at, mask=chunk_row < rows, other=0.0).to(tl.float32)
            if gamma is not None:
                total += tl.where(chunk_row < rows, tl.load(gamma + seq * H + head).to(tl.float32), 0.0)
            bg += total[:, None]
        bk = tl.reshape(bk, [16, 4, BK])
        e = tl.reshape(exp_of_log(bg), [16, 4, BK])
        fq = tl.reshape(e, [2, 2, 2, 2, 2, 2, BK])
        if q is not None:
            bq = tl.reshape(bq, [16, 4, BK])
            same = tl.dot(tl.permute(bq.to(bk.dtype), [1, 0, 2]), tl.permute(bk, [1, 2, 0]))
            acc16 = tl.where(x16 == 0, same * scale + acc16, acc16)
            fq = tl.reshape(bq.to(tl.float32) * scale * e, [2, 2, 2, 2, 2, 2, BK])
        fk = tl.reshape(bk.to(tl.float32), [2, 2, 2, 2, 2, 2, BK])
        p = tl.reshape(e, [2, 2, 2, 2, 2, 2, BK])
        for level in tl.static_range(4):  # row bits 0-3: axes 3, 2, 1, 0
            if q is not None:
                P = tl.permute(tl.reshape(tl.where(upper_half(3 - level), fq, fk).to(PT), [16, 4, BK]), [1, 0, 2])
                s16 = dot(P, tl.permute(P, [0, 2, 1]), None, PT, "tf32")
                acc16 = tl.where((x16 >> level) == 1, acc16 + s16, acc16)
            before, after, p = double(p, 3 - level)
            fq *= before
            fk *= after
            if level == 2 and block_decays is not None:
                i = tl.arange(0, 8)[:, None]
                n = (i & 3) * 2 + (i >> 2)  # p's axes are row bit 3, then bits 5 and 4
                column = ik + tl.arange(0, BK)[None, :]
                tl.store(block_decays + (index * 8 + n) * K + column, tl.reshape(p, [8, BK]), mask=column < K)
        for level in tl.static_range(4, 6):  # row bits 4, 5 (warps): axes 5, 4
            if q is not None:
                P = tl.permute(tl.reshape(tl.where(upper_half(9 - level), fq, fk).to(PT), [16, 4, BK]), [1, 0, 2])
                P = tl.reshape(P, [C, BK])
                whole = dot(P, tl.trans(P), None, PT, "tf32")
                if KP > BK:
                    acc = tl.where((x >> level) == 1, acc + whole, acc)
                else:
                    acc = tl.where((x >> level) == 1, whole, acc)
            before, after, p = double(p, 9 - level)
            fq *= before
            fk *= after
        if q is not None:
            store_split(qd + ik, index * SPLIT, C * KP, cd + od, tl.reshape(fq, [C, BK]), SPLIT)
        store_split(kd + ik, index * SPLIT, C * KP, cd + od, tl.reshape(fk, [C, BK]), SPLIT)
        tl.store(chunk_decay + index * KP + ik + tl.arange(0, BK), tl.reshape(p, [BK]))
    if q is not None:
        diagonal = tl.where((r16[:, None] >= r16[None, :])[None, :, :], acc16, 0.0)
        store_scores(A, A_low, index, diagonal, tl.where(r[:, None] > r[None, :], acc, 0.0), True)


@triton.jit
def gated_rows(
    q, k, g, gs, gamma, chunks, weak, scale, T, NT, COUNT, filled_A, filled_A_low, filled_qd, filled_kd, filled_chunk_decay,
    A, A_low, qd, kd, chunk_decay, block_decays,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HG: tl.constexpr, HGS: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, BK: tl.constexpr, SIGN: tl.constexpr, EVEN: tl.constexpr, SPLIT: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Programs: groups of GROUP of COUNT chunks * heads. Chunks that are `weak` [chunks, H] are done already, in this memory.

    A [chunks, H, 64, 64], qd, kd [chunks, H, SPLIT, 64, KP], chunk_decay [chunks, H, KP]; KP >= K in steps of BK. SPLIT: 1, or
    2: high and low part of the rows, whose scores then are products of tf32. block_decays [chunks, H, 8, K] (None: not kept):
    the decay of each block of 8 rows, for `gated_axis`. A_low: the low part of A, or None. Without q none of A, A_low, qd.
    filled_*: memory shared with outputs.
    """
    _, head, unit = program_at(1, H)
    first = unit * GROUP
    if all_weak(weak, first, head, COUNT, H, GROUP):
        return
    for n in range(GROUP):
        s = first + n
        if s < COUNT:
            token, rows, seq = chunk_at(chunks, s, T, NT, 64, SIGN)
            index = s.to(tl.int64) * H + head
            if (rows > 0) & (tl.load(weak + index) == 0):
                _rows_of_chunk(
                    q, k, g, gs, gamma, token, rows, seq, head, index, scale, A, A_low, qd, kd, chunk_decay, block_decays, H,
                    HQ, HK, HG, HGS, K, KP, BK, SIGN, EVEN, SPLIT,
                )  # fmt: skip
