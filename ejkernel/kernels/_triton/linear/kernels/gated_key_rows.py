"""`gated_rows` for queries and keys at once, as the delta rule reads them: exact for every gate, bfloat16, 64 rows.

Keys are read by queries and by the keys after them, under the same decays. So the tree of decays is there once, and the keys
that are read. At a level inside 16 rows one operand holds the 8 rows of queries and the 8 of keys that read, the other one the
8 keys that are read: one product of 16 x 8 makes the scores of both.
"""

# mypy: disable-error-code="assignment,var-annotated,misc"
# ruff: noqa: RUF005  (Triton knows tuples and their sums, but not iterable unpacking; their length changes on the way)
from __future__ import annotations

import triton
import triton.language as tl

from ejkernel.kernels._triton.linear.kernels.gated_rows import double, store_scores, upper_half
from ejkernel.kernels._triton.linear.kernels.tiles import all_weak, chunk_at, exp_of_log, program_at, put


@triton.jit
def _halves(x, AXIS: tl.constexpr, BK: tl.constexpr):
    """(lower, upper) half [8, 4, BK] of an axis, 0 to 3, of x [2, 2, 2, 2, 2, 2, BK]."""
    if AXIS == 0:
        low, high = tl.split(tl.permute(x, [1, 2, 3, 4, 5, 6, 0]))
    elif AXIS == 1:
        low, high = tl.split(tl.permute(x, [0, 2, 3, 4, 5, 6, 1]))
    elif AXIS == 2:
        low, high = tl.split(tl.permute(x, [0, 1, 3, 4, 5, 6, 2]))
    else:
        low, high = tl.split(tl.permute(x, [0, 1, 2, 4, 5, 6, 3]))
    return tl.reshape(low, [8, 4, BK]), tl.reshape(high, [8, 4, BK])


@triton.jit
def _spread(x, LEVEL: tl.constexpr):
    """[4, 16, 16] of x [4, 8, 8], a level's scores of the rows whose bit LEVEL is 1 with those where it is 0; 0 elsewhere."""
    x = tl.reshape(x, [4, 8 >> LEVEL, 1 << LEVEL, 8 >> LEVEL, 1 << LEVEL])
    x = tl.permute(tl.join(tl.zeros_like(x), x), [0, 1, 5, 2, 3, 4])
    return tl.reshape(tl.permute(tl.join(x, tl.zeros_like(x)), [0, 1, 2, 3, 4, 6, 5]), [4, 16, 16])


@triton.jit
def _whole(x, BK: tl.constexpr):
    """[64, BK] in the order of rows, of [2, 2, 2, 2, 2, 2, BK]."""
    return tl.reshape(tl.permute(tl.reshape(x, [16, 4, BK]), [1, 0, 2]), [64, BK])


@triton.jit(noinline=True)
def _rows_of_chunk(
    q, k, g, token, rows, head, index, scale,
    A, qd, kd, M, M_low, kp, chunk_decay, block_decays,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HG: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    BK: tl.constexpr, SIGN: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """`gated_key_rows` of one chunk. A call of its own, and rows and columns as in `gated_rows`."""
    C: tl.constexpr = 64
    DT: tl.constexpr = kd.dtype.element_ty
    VEC: tl.constexpr = BK // 32
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
    q += (token * HQ + head // (H // HQ)) * K
    k += (token * HK + head // (H // HK)) * K
    g += (token * HG + head // (H // HG)) * K
    x = r[:, None] ^ r[None, :]
    r16 = tl.arange(0, 16)
    x16 = (r16[:, None] ^ r16[None, :])[None, :, :]
    diagonal = tl.zeros([4, 16, 16], tl.float32)
    levels = ()  # of the diagonal 16 x 16 blocks: rows of queries, then of keys
    for _level in tl.static_range(4):
        levels = levels + (tl.zeros([4, 16, 8], tl.float32),)
    of_queries = tl.zeros([C, C], tl.float32)  # levels 4 and 5
    of_keys = tl.zeros([C, C], tl.float32)
    for ik in range(0, KP, BK):
        if EVEN and K == KP:
            bq = tl.load(q + ik + cq + oq)
            bk = tl.load(k + ik + ck + ok)
            bg = tl.load(g + ik + cg + og)
        else:
            if K == KP:
                m = inside
            else:
                m = inside & (ik + tl.arange(0, BK)[None, :] < K)
            bq = tl.load(q + ik + cq + oq, mask=m, other=0.0)
            bk = tl.load(k + ik + ck + ok, mask=m, other=0.0)
            bg = tl.load(g + ik + cg + og, mask=m, other=0.0)
        bq = tl.reshape(bq.to(DT), [16, 4, BK])
        bk = tl.reshape(bk, [16, 4, BK])
        e = tl.reshape(exp_of_log(bg.to(tl.float32)), [16, 4, BK])
        diagonal = tl.dot(tl.permute(bq, [1, 0, 2]), tl.permute(bk, [1, 2, 0]), diagonal)
        fq = tl.reshape(bq.to(tl.float32) * scale * e, [2, 2, 2, 2, 2, 2, BK])
        fr = tl.reshape(bk.to(tl.float32) * e, [2, 2, 2, 2, 2, 2, BK])
        fk = tl.reshape(bk.to(tl.float32), [2, 2, 2, 2, 2, 2, BK])
        p = tl.reshape(e, [2, 2, 2, 2, 2, 2, BK])
        for level in tl.static_range(4):  # row bits 0-3: axes 3, 2, 1, 0
            _, reading_queries = _halves(fq, 3 - level, BK)
            _, reading_keys = _halves(fr, 3 - level, BK)
            read, _ = _halves(fk, 3 - level, BK)
            reading = tl.reshape(tl.permute(tl.join(reading_queries, reading_keys), [1, 3, 0, 2]), [4, 16, BK])
            levels = put(levels, level, tl.dot(reading.to(DT), tl.permute(read, [1, 2, 0]).to(DT), levels[level]))
            before, after, p = double(p, 3 - level)
            fq *= before
            fr *= before
            fk *= after
            if level == 2 and block_decays is not None:
                i = tl.arange(0, 8)[:, None]
                n = (i & 3) * 2 + (i >> 2)  # p's axes are row bit 3, then bits 5 and 4
                column = ik + tl.arange(0, BK)[None, :]
                tl.store(block_decays + (index * 8 + n) * K + column, tl.reshape(p, [8, BK]), mask=column < K)
        for level in tl.static_range(4, 6):  # row bits 4, 5 (warps): axes 5, 4
            b = upper_half(9 - level)
            if level == 4:  # where the first half's lower block meets the second half's upper one, it must not count
                P = _whole(tl.where(b, fq, fk).to(DT), BK)
                R = _whole(tl.where(b, fr, fk).to(DT), BK)
                of_queries = tl.where((x >> 4) == 1, of_queries + tl.dot(P, tl.trans(R)), of_queries)
                of_keys = tl.where((x >> 4) == 1, of_keys + tl.dot(R, tl.trans(R)), of_keys)
            else:
                read = tl.trans(_whole(tl.where(b, 0.0, fk).to(DT), BK))
                of_queries = tl.dot(_whole(tl.where(b, fq, 0.0).to(DT), BK), read, of_queries)
                of_keys = tl.dot(_whole(tl.where(b, fr, 0.0).to(DT), BK), read, of_keys)
            before, after, p = double(p, 9 - level)
            fq *= before
            fr *= before
            fk *= after
        at = index * (C * KP) + cd + od
        tl.store(qd + ik + at, tl.reshape(fq, [C, BK]).to(DT))
        tl.store(kp + ik + at, tl.reshape(fr, [C, BK]).to(DT))
        tl.store(kd + ik + at, tl.reshape(fk, [C, BK]).to(DT))
        tl.store(chunk_decay + index * KP + ik + tl.arange(0, BK), tl.reshape(p, [BK]))
    of_queries16 = tl.where(x16 == 0, diagonal * scale, 0.0)
    of_keys16 = tl.zeros([4, 16, 16], tl.float32)
    for level in tl.static_range(4):
        queries, keys = tl.split(tl.permute(tl.reshape(levels[level], [4, 2, 8, 8]), [0, 2, 3, 1]))
        of_queries16 += tl.where((x16 >> level) == 1, _spread(queries, level), 0.0)
        of_keys16 += tl.where((x16 >> level) == 1, _spread(keys, level), 0.0)
    store_scores(A, None, index, of_queries16, of_queries, False)
    store_scores(M, M_low, index, of_keys16, of_keys, False)


@triton.jit
def gated_key_rows(
    q, k, g, chunks, weak, scale, T, NT, COUNT, filled_A, filled_qd, filled_kd, filled_M, filled_M_low, filled_kp,
    filled_chunk_decay,
    A, qd, kd, M, M_low, kp, chunk_decay, block_decays,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HG: tl.constexpr, K: tl.constexpr, KP: tl.constexpr,
    BK: tl.constexpr, SIGN: tl.constexpr, EVEN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Programs: groups of GROUP of COUNT chunks * heads. Chunks that are `weak` [chunks, H] are done already, in this memory.

    A, qd, kd, chunk_decay, block_decays: as of `gated_rows`. M, M_low [chunks, H, 64, 64], kp [chunks, H, 64, KP]: what A, its
    low part and qd are of queries, of keys in their place with a scale of 1. Nothing is written above the diagonal blocks of
    16 x 16 of A and M. filled_*: memory shared with outputs.
    """
    _, head, unit = program_at(1, H)
    first = unit * GROUP
    if all_weak(weak, first, head, COUNT, H, GROUP):
        return
    for n in range(GROUP):
        s = first + n
        if s < COUNT:
            token, rows, _ = chunk_at(chunks, s, T, NT, 64, SIGN)
            index = s.to(tl.int64) * H + head
            if (rows > 0) & (tl.load(weak + index) == 0):
                _rows_of_chunk(
                    q, k, g, token, rows, head, index, scale, A, qd, kd, M, M_low, kp, chunk_decay, block_decays, H, HQ, HK,
                    HG, K, KP, BK, SIGN, EVEN,
                )  # fmt: skip
