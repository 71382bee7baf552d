"""Gradients of query, key and a gate per key channel, in chunks of 64 rows that are not weakly gated, bfloat16.

`gated_axis` for queries and for keys at once, by its formula and in its order of rows. Keys are read by queries and, with the
opposite sign, by the keys after them, under the same decays. So the decays, the keys and the sums that make the gate's gradient
are there once. What a key gets as a reader and as one that is read is one sum: a chunk needs no more registers than in
`gated_axis`.
"""

# mypy: disable-error-code="assignment,var-annotated,misc"
# ruff: noqa: RUF005  (Triton knows tuples and their sums, but not iterable unpacking; their length changes on the way)
from __future__ import annotations

import triton
import triton.language as tl

from ejkernel.kernels._triton.linear.kernels.gated_axis import (
    between,
    of_blocks,
    row_of_blocks,
    rows_of_tile,
    store_row_of_blocks,
    tile_of_rows,
)
from ejkernel.kernels._triton.linear.kernels.other_axis import block_row, rows_in_blocks
from ejkernel.kernels._triton.linear.kernels.tiles import all_weak, chunk_at, dot, exp_of_log, load_state, program_at, put


@triton.jit
def delta_scores_in_blocks(
    do, dv, errors, betas, chunks, weak, scale, T, NT,
    dN, dM, within_blocks,
    H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, SIGN: tl.constexpr, EVEN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Programs: chunks * heads. Adjoints of scores as `delta_score_adjoints` makes them, in chunks that are not `weak`.

    dN, dM [chunks, H, 64, 64] in block order, with the same at (s, t) as at (t, s). within_blocks [chunks, H, 8, 8, 8, 2],
    float32: element [b, s, t] are those of rows (t, s) of block b, first dN's.
    """
    C: tl.constexpr = 64
    DT: tl.constexpr = dN.dtype.element_ty
    _, head, s = program_at(1, H)
    token, rows, _ = chunk_at(chunks, s, T, NT, C, SIGN)
    if rows <= 0:
        return
    index = s.to(tl.int64) * H + head
    if tl.load(weak + index) == 1:
        return
    r = tl.arange(0, C)
    row = block_row(r)
    by_queries = tl.zeros([C, C], tl.float32)  # of do E^T: right at (t, s) where s is read by t, and its transpose
    of_queries = tl.zeros([C, C], tl.float32)
    by_keys = tl.zeros([C, C], tl.float32)  # of dv E^T
    of_keys = tl.zeros([C, C], tl.float32)
    for col in range(0, V, BV):
        bd = rows_in_blocks(do, token, rows, head, col, H, V, BV, SIGN, EVEN)  # [C, BV]
        br = rows_in_blocks(dv, token, rows, head, col, H, V, BV, SIGN, EVEN)
        be = rows_in_blocks(errors, token, rows, head, col, H, V, BV, SIGN, EVEN)
        by_queries = dot(bd, tl.trans(be), by_queries, DT, PREC)
        of_queries = dot(be, tl.trans(bd), of_queries, DT, PREC)
        by_keys = dot(br, tl.trans(be), by_keys, DT, PREC)
        of_keys = dot(be, tl.trans(br), of_keys, DT, PREC)
    beta = tl.load(betas + index * C + row)  # [C]: of U = beta E
    later = row[:, None] >= row[None, :]
    read = tl.where(later, beta[None, :], beta[:, None])  # [C, C]: that of the row which is read
    N = tl.where(later, by_queries, of_queries) * (read * scale)
    M = tl.where(row[:, None] == row[None, :], 0.0, tl.where(later, by_keys, of_keys) * -read)
    at = index * (C * C) + (r[:, None] * C + r[None, :])
    tl.store(dN + at, N.to(DT))
    tl.store(dM + at, M.to(DT))
    inside = ((r & 7)[:, None] == (r & 7)[None, :]) & (row[:, None] >= row[None, :])
    at = within_blocks + index * 1024 + (((r & 7) * 64 + (r >> 3)) * 2)[:, None] + ((r >> 3) * 16)[None, :]
    tl.store(at, N, mask=inside)
    tl.store(at + 1, M, mask=inside)


@triton.jit
def _pair(at):
    """The two float32 numbers at each address, by one load."""
    both = tl.load(at.to(tl.pointer_type(tl.int64)))
    low = (both & 0xFFFFFFFF).to(tl.int32).to(tl.float32, bitcast=True)
    return low, (both >> 32).to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _within_blocks(pairs, qs, ks, es, dqs, dks, dgs):
    """Adds to (dq, dk, dg) the scores of different rows inside blocks of 8, one by one; pairs: where those of rows (0, 0) of
    each block lie.

    Column by column, with the decay from row j to row t in w.
    """
    for j in tl.static_range(7):
        w = es[j + 1]
        found = ()
        total = dks[j]
        for t in tl.static_range(j + 1, 8):
            n, m = _pair(pairs + (t + j * 8) * 2)
            n *= w
            m *= w
            dqs = put(dqs, t, dqs[t] + n * ks[j])
            dks = put(dks, t, dks[t] + m * ks[j])
            term = n * qs[t] + m * ks[t]
            total += term
            found = found + (term * ks[j],)
            if t < 7:
                w = w * es[t + 1]
        dks = put(dks, j, total)
        spanning = tl.zeros_like(es[0])  # of scores (t, j) with t >= r, for r from 7 down
        for back in tl.static_range(7 - j):
            spanning += found[6 - j - back]
            dgs = put(dgs, 7 - back, dgs[7 - back] + spanning)
    return dqs, dks, dgs


@triton.jit
def _add_level(by_queries, by_keys, upper, far, qs, ks, pre, suf, dqs, dks, dgs):
    """Adds one level's products: rows of `upper` blocks read, queries (to dq) and keys (to dk); the others are read (to dk).

    The decay of row j is in the prefix of every row t >= j of an upper block and in the suffix of every row t < j of another.
    Returns (dq, dk, dg, and each block's sum for the gate).
    """
    one = tl.where(upper, 1.0, 0.0)  # products with it cost less than selections
    other = 1.0 - one
    reading = tl.zeros_like(pre[0])
    being_read = tl.zeros_like(pre[0])
    found = ()
    for t in tl.static_range(8):
        decay = tl.where(upper, pre[t], suf[t]) * far
        n = by_queries[t] * decay
        m = by_keys[t] * decay
        dqs = put(dqs, t, dqs[t] + n * one)
        dks = put(dks, t, dks[t] + (m + n * other))
        f = n * tl.where(upper, qs[t], ks[t]) + m * ks[t]
        found = found + (f,)
        dgs = put(dgs, t, dgs[t] + being_read)
        being_read += f * other
    for t in tl.static_range(7, -1, -1):
        reading += found[t] * one
        dgs = put(dgs, t, dgs[t] + reading)
    return dqs, dks, dgs, reading + being_read  # a block is upper or lower, so one of the two is 0


@triton.jit
def _add_states(of_queries, of_keys, end_rows, before, after, scale, qs, ks, pre, suf, dqs, dks, dgs):
    """`_add_level` for the state before the chunk, which every row reads, and the adjoint after it, which reads every row."""
    reading = tl.zeros_like(pre[0])
    being_read = tl.zeros_like(pre[0])
    for t in tl.static_range(7, -1, -1):
        decay = pre[t] * before
        n = of_queries[t] * (decay * scale)
        m = of_keys[t] * decay
        dqs = put(dqs, t, dqs[t] + n)
        dks = put(dks, t, dks[t] - m)
        reading += n * qs[t] - m * ks[t]
        dgs = put(dgs, t, dgs[t] + reading)
    for t in tl.static_range(8):
        f = end_rows[t] * (suf[t] * after)
        dks = put(dks, t, dks[t] + f)
        dgs = put(dgs, t, dgs[t] + being_read)
        being_read += f * ks[t]
    return dqs, dks, dgs, reading, being_read


@triton.jit
def _from_states(
    do, dv, errors, starts, ends, token, rows, index, head, col, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, SIGN: tl.constexpr, EVEN: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """(rows of do S^T, of dv S^T, of E dS^T, sum over value channels of S * dS [BK]), before any decay."""
    of_queries = tl.zeros([64, BK], tl.float32)
    of_keys = tl.zeros([64, BK], tl.float32)
    from_end = tl.zeros([64, BK], tl.float32)
    through = tl.zeros([BK], tl.float32)
    for c in tl.range(0, (V + BV - 1) // BV * BV, BV, num_stages=STAGES):
        S = load_state(starts, index, col, c, K, V, V, 1, BK, BV)  # [BK, BV]
        bd = rows_in_blocks(do, token, rows, head, c, H, V, BV, SIGN, EVEN)  # [64, BV]
        br = rows_in_blocks(dv, token, rows, head, c, H, V, BV, SIGN, EVEN)
        dS = load_state(ends, index, col, c, K, V, V, 1, BK, BV)
        be = rows_in_blocks(errors, token, rows, head, c, H, V, BV, SIGN, EVEN)
        of_queries = dot(bd, tl.trans(S), of_queries, DT, PREC)
        of_keys = dot(br, tl.trans(S), of_keys, DT, PREC)
        from_end = dot(be, tl.trans(dS), from_end, DT, PREC)
        through += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
    return rows_of_tile(of_queries), rows_of_tile(of_keys), rows_of_tile(from_end), through


@triton.jit
def _scores_of_level(at, here, LEVEL: tl.constexpr):
    """Scores [64, 64], those that are not `here` as 0: eight by one load, where a mask would have each loaded by itself.

    By another policy at each level, since the compiler would make one load of three, and keep what it gives in registers.
    """
    if LEVEL == 0:
        x = tl.load(at)
    elif LEVEL == 1:
        x = tl.load(at, eviction_policy="evict_last")
    else:
        x = tl.load(at, eviction_policy="evict_first")
    return tl.where(here, x, 0.0)


@triton.jit(noinline=True)
def _gradients_of_chunk(
    q, k, g, dN, dM, within_blocks, block_decays, do, dv, errors, betas, starts, ends, token, rows, head, index, col, scale,
    dq, dk, dg,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SIGN: tl.constexpr, EVEN: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """`delta_gated_gradients` of one chunk. A call of its own, as in `gated_axis`."""
    C: tl.constexpr = 64
    DT: tl.constexpr = dN.dtype.element_ty
    blk = tl.arange(0, 8)[None, :]
    c = col + tl.arange(0, BK)[:, None]
    of_keys = (token * HK + head // (H // HK)) * K + (blk * (8 * SIGN * HK * K) + c)  # [BK, 8]
    of_head = (token * H + head) * K + (blk * (8 * SIGN * H * K) + c)
    pairs = within_blocks + index * 1024 + (blk * 128 + (c - c))  # [BK, 8]: one address in every channel, to keep the layout
    qs = ()
    ks = ()
    es = ()
    for t in tl.static_range(8):
        step = t * (SIGN * HK * K)
        es = es + (exp_of_log(row_of_blocks(g + of_head + t * (SIGN * H * K), blk * 8 + t, rows, c, K, BK, EVEN)),)
        qs = qs + (row_of_blocks(q + of_keys + step, blk * 8 + t, rows, c, K, BK, EVEN),)
        ks = ks + (row_of_blocks(k + of_keys + step, blk * 8 + t, rows, c, K, BK, EVEN),)
    pre = (es[0],)
    suf = (tl.full([BK, 8], 1.0, tl.float32),)
    for t in tl.static_range(1, 8):
        pre = pre + (pre[t - 1] * es[t],)
        suf = (suf[0] * es[8 - t],) + suf
    # Decays of whole blocks: between a row's block and its half of 16, 32 and 64 rows.
    before = tl.full([BK, 8], 1.0, tl.float32)
    after = tl.full([BK, 8], 1.0, tl.float32)
    far16 = tl.full([BK, 8], 1.0, tl.float32)
    far32 = tl.full([BK, 8], 1.0, tl.float32)
    through_all = tl.full([BK, 8], 1.0, tl.float32)
    for n in tl.static_range(8):
        decay = tl.load(block_decays + (index * 8 + n) * K + c + blk * 0, mask=c < K, other=1.0)
        through_all *= decay
        before *= tl.where(blk > n, decay, 1.0)
        after *= tl.where(blk < n, decay, 1.0)
        far16 *= tl.where(between(blk, n, 1), decay, 1.0)
        far32 *= tl.where(between(blk, n, 2), decay, 1.0)
    dqs = ()
    dks = ()
    dgs = ()
    for t in tl.static_range(8):
        same = tl.load(pairs + t * 18)  # a row with itself, which nothing decays
        dqs = dqs + (same * ks[t],)
        dks = dks + (same * qs[t],)
        dgs = dgs + (tl.zeros([BK, 8], tl.float32),)
    # The states come first, while little else is in registers, and what they give is added up at once. They are a level whose
    # lower half is everything before the rows, or whose upper half is everything after them.
    start_of_queries, start_of_keys, end_rows, through = _from_states(
        do, dv, errors, starts, ends, token, rows, index, head, col, H, K, V, BK, BV, SIGN, EVEN, DT, PREC, STAGES
    )
    for t in tl.static_range(8):
        end_rows = put(end_rows, t, end_rows[t] * tl.load(betas + (index * C + t) + blk * 8))  # [BK, 8] * [1, 8]
    dqs, dks, dgs, starting, ending = _add_states(
        start_of_queries, start_of_keys, end_rows, before, after, scale, qs, ks, pre, suf, dqs, dks, dgs
    )
    dqs, dks, dgs = _within_blocks(pairs, qs, ks, es, dqs, dks, dgs)
    # Levels of 8, 16 and 32 rows: upper blocks read, lower ones are read.
    r = tl.arange(0, C)
    at = index * (C * C) + (r[:, None] * C + r[None, :])
    apart = (r & 7)[:, None] ^ (r & 7)[None, :]
    for level in tl.static_range(3):
        upper = ((blk >> level) & 1) == 1
        far = 1.0
        if level == 1:
            far = far16
        if level == 2:
            far = far32
        by_queries = ()
        by_keys = ()
        for t in tl.static_range(8):
            decay = tl.where(upper, pre[t], suf[t]) * far
            by_queries = by_queries + ((tl.where(upper, qs[t], ks[t]) * decay).to(DT),)
            by_keys = by_keys + ((ks[t] * decay).to(DT),)
        here = (apart >> level) == 1
        found = dot(_scores_of_level(dN + at, here, level), tile_of_rows(by_queries), None, DT, PREC)
        found_keys = dot(_scores_of_level(dM + at, here, level), tile_of_rows(by_keys), None, DT, PREC)
        dqs, dks, dgs, block_sum = _add_level(
            rows_of_tile(found), rows_of_tile(found_keys), upper, far, qs, ks, pre, suf, dqs, dks, dgs
        )
        if level == 1:
            sum16 = block_sum
    of_levels = of_blocks(sum16, block_sum, BK)
    whole = tl.zeros([BK, 8], tl.float32)
    for n in tl.static_range(8):
        of16, of32 = tl.split(of_levels[n])
        whole += tl.where(between(n, blk, 1), of16[:, None], 0.0) + tl.where(between(n, blk, 2), of32[:, None], 0.0)
    # The decays of a whole block n also count in what other blocks read and have read across it.
    of_states = of_blocks(starting, ending, BK)
    for n in tl.static_range(8):
        started, ended = tl.split(of_states[n])
        whole += tl.where(blk < n, started[:, None], 0.0) + tl.where(blk > n, ended[:, None], 0.0)
    # The detour through a join keeps the layout of S from spreading over all rows.
    whole += tl.split(tl.join(through, through))[0][:, None] * through_all
    for t in tl.static_range(8):
        at = of_head + t * (SIGN * H * K)
        store_row_of_blocks(dq + at, dqs[t], blk * 8 + t, rows, c, K, BK, EVEN)
        store_row_of_blocks(dk + at, dks[t], blk * 8 + t, rows, c, K, BK, EVEN)
        store_row_of_blocks(dg + at, dgs[t] + whole, blk * 8 + t, rows, c, K, BK, EVEN)


@triton.jit
def delta_gated_gradients(
    q, k, g, dN, dM, within_blocks, block_decays, do, dv, errors, betas, starts, ends, chunks, weak, scale, T, NT, COUNT,
    filled_dq, filled_dk, filled_dg,
    dq, dk, dg,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SIGN: tl.constexpr, EVEN: tl.constexpr, PREC: tl.constexpr, STAGES: tl.constexpr,
    GROUP: tl.constexpr,
):  # fmt: skip
    """Programs: tiles of BK key channels * groups of GROUP of COUNT chunks * heads. dq, dk, dg [tokens, H, K].

    Chunks that are `weak` [chunks, H] were done before, in the same memory: filled_*. dN, dM, within_blocks: of
    `delta_scores_in_blocks`; block_decays [chunks, H, 8, K]: each block's decay. do, dv, errors [tokens, H, V]; betas
    [chunks, H, 64]; starts, ends [chunks, H, K, V]: state before, adjoint after each chunk.
    """
    TILES: tl.constexpr = (K + BK - 1) // BK
    tile, head, unit = program_at(TILES, H)
    first = unit * GROUP
    if all_weak(weak, first, head, COUNT, H, GROUP):
        return
    for n in range(GROUP):
        s = first + n
        if s < COUNT:
            token, rows, _ = chunk_at(chunks, s, T, NT, 64, SIGN)
            index = s.to(tl.int64) * H + head
            if (rows > 0) & (tl.load(weak + index) == 0):
                _gradients_of_chunk(
                    q, k, g, dN, dM, within_blocks, block_decays, do, dv, errors, betas, starts, ends, token, rows, head,
                    index, tile * BK, scale, dq, dk, dg, H, HK, K, V, BK, BV, SIGN, EVEN, PREC, STAGES,
                )  # fmt: skip
