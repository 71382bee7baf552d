"""One gated axis of a chunk of 64 rows in bfloat16: the fast form of `general_gated_axis`, with the same formula.

A thread holds all 8 rows of a block for its channel. Scores of rows inside such a block are taken one by one in float32: the
decay between two rows is a running product in a register, so each costs eight instructions and no layout ever changes. Only the
three levels above (8, 16 and 32 rows) and the states are products on the tensor cores.

Rows are in block order: row r is chunk row (r % 8) * 8 + r // 8. With eight warps, warp w has block w.
"""

# mypy: disable-error-code="assignment,var-annotated,misc"
# ruff: noqa: RUF005  (Triton knows tuples and their sums, but not iterable unpacking; their length changes on the way)
from __future__ import annotations

import triton
import triton.language as tl

from ejkernel.kernels._triton.linear.kernels.other_axis import other_rows
from ejkernel.kernels._triton.linear.kernels.tiles import (
    all_weak,
    chunk_at,
    dot,
    dot_split,
    exp_of_log,
    load_state,
    low_part,
    program_at,
    put,
    term_at,
)


@triton.jit
def tile_of_rows(x):
    """[64, BD] from 8 rows, each [BD, 8]: row t of block b becomes tile row 8 t + b. Moves nothing between threads."""
    a0, a1, a2, a3 = tl.join(x[0], x[1]), tl.join(x[2], x[3]), tl.join(x[4], x[5]), tl.join(x[6], x[7])
    whole = tl.join(tl.join(a0, a1), tl.join(a2, a3))  # [BD, 8, 2, 2, 2]
    return tl.reshape(tl.permute(whole, [4, 3, 2, 1, 0]), [64, x[0].shape[0]])


@triton.jit
def rows_of_tile(x):
    """The 8 rows, each [BD, 8], of a tile [64, BD]: the inverse of `tile_of_rows`."""
    low, high = tl.split(tl.permute(tl.reshape(x, [2, 2, 2, 8, x.shape[1]]), [4, 3, 2, 1, 0]))  # of [BD, 8, 2, 2, 2]
    a0, a1 = tl.split(low)
    a2, a3 = tl.split(high)
    return tl.split(a0) + tl.split(a1) + tl.split(a2) + tl.split(a3)


@triton.jit
def row_of_blocks(at, row, rows, c, D: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr):
    """[BD, 8] in float32: one row of each block; 0 outside."""
    if EVEN and D % BD == 0:
        return tl.load(at).to(tl.float32)
    else:
        return tl.load(at, mask=(row < rows) & (c < D), other=0.0).to(tl.float32)


@triton.jit
def store_row_of_blocks(at, value, row, rows, c, D: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr):
    if EVEN and D % BD == 0:
        tl.store(at, value.to(at.dtype.element_ty))
    else:
        tl.store(at, value.to(at.dtype.element_ty), mask=(row < rows) & (c < D))


@triton.jit
def between(block, n, LEVEL: tl.constexpr):
    """Whether block n lies between `block` and the middle that the halves of 2^LEVEL blocks have in common."""
    same_half = (block >> LEVEL) == (n >> LEVEL)
    upper = ((block >> LEVEL) & 1) == 1
    return same_half & ((upper & (n < block)) | ((upper == 0) & (n > block)))


@triton.jit
def _within_blocks_one_by_one(pm, xs, ys, es):
    """(dx, dy, dg) of the scores inside blocks of 8 rows, one by one; pm: where the score (0, 0) of each block lies.

    Column by column, with the decay from row j to row t in w.
    """
    dxs = ()
    dys = ()
    dgs = ()
    for t in tl.static_range(8):
        same = tl.load(pm + t * 9)  # a row with itself, which nothing decays
        dxs = dxs + (same * ys[t],)
        dys = dys + (same * xs[t],)
        dgs = dgs + (tl.zeros_like(es[0]),)
    for j in tl.static_range(7):
        w = es[j + 1]
        found = ()
        total = dys[j]
        for t in tl.static_range(j + 1, 8):
            m = tl.load(pm + (t + j * 8)) * w
            dxs = put(dxs, t, dxs[t] + m * ys[j])
            term = m * xs[t]
            total += term
            found = found + (term * ys[j],)
            if t < 7:
                w = w * es[t + 1]
        dys = put(dys, j, total)
        spanning = tl.zeros_like(es[0])  # of scores (t, j) with t >= r, for r from 7 down
        for back in tl.static_range(7 - j):
            spanning += found[6 - j - back]
            dgs = put(dgs, 7 - back, dgs[7 - back] + spanning)
    return dxs, dys, dgs


@triton.jit
def _add_level(found, upper, far, xs, ys, pre, suf, dxs, dys, dgs):
    """Adds one level's products: rows of `upper` blocks read (to dx), the others are read (to dy).

    The decay of row j is in the prefix of every row t >= j of an upper block and in the suffix of every row t < j of another.
    Returns (dx, dy, dg, and each block's sums for the upper blocks and for the others).
    """
    one = tl.where(upper, 1.0, 0.0)  # products with it cost less than selections
    other = 1.0 - one
    reading = tl.zeros_like(pre[0])
    being_read = tl.zeros_like(pre[0])
    for t in tl.static_range(7, -1, -1):
        f = found[t] * (tl.where(upper, pre[t], suf[t]) * far)
        dxs = put(dxs, t, dxs[t] + f * one)
        dys = put(dys, t, dys[t] + f * other)
        f *= tl.where(upper, xs[t], ys[t])
        reading += f * one
        dgs = put(dgs, t, dgs[t] + reading)
        found = put(found, t, f)
    for t in tl.static_range(8):
        dgs = put(dgs, t, dgs[t] + being_read)
        being_read += found[t] * other
    return dxs, dys, dgs, reading, being_read


@triton.jit
def _add_start(found, before, xs, pre, dxs, dgs):
    """`_add_level` for the state before the chunk, which every row reads."""
    reading = tl.zeros_like(pre[0])
    for t in tl.static_range(7, -1, -1):
        f = found[t] * (pre[t] * before)
        dxs = put(dxs, t, dxs[t] + f)
        reading += f * xs[t]
        dgs = put(dgs, t, dgs[t] + reading)
    return dxs, dgs, reading


@triton.jit
def _add_end(found, after, ys, suf, dys, dgs):
    """`_add_level` for the adjoint after the chunk, which reads every row."""
    being_read = tl.zeros_like(suf[0])
    for t in tl.static_range(8):
        f = found[t] * (suf[t] * after)
        dys = put(dys, t, dys[t] + f)
        dgs = put(dgs, t, dgs[t] + being_read)
        being_read += f * ys[t]
    return dys, dgs, being_read


@triton.jit
def of_blocks(a, b, BD: tl.constexpr):
    """For each of the 8 blocks, ([BD], [BD]): every thread then has what a and b [BD, 8] hold for all blocks."""
    both = tl.reshape(tl.join(a, b), [BD, 2, 2, 2, 2])
    low, high = tl.split(tl.permute(both, [0, 4, 3, 2, 1]))  # the block's three bits last
    a0, a1 = tl.split(low)
    a2, a3 = tl.split(high)
    return tl.split(a0) + tl.split(a1) + tl.split(a2) + tl.split(a3)


@triton.jit
def _from_states(
    x2, y2, chunk_decay2, starts, ends, token, rows, index, head, col, H: tl.constexpr, HX2: tl.constexpr, HY2: tl.constexpr,
    D: tl.constexpr, D2: tl.constexpr, P2: tl.constexpr, BD: tl.constexpr, B2: tl.constexpr, STRIDE: tl.constexpr,
    STRIDE2: tl.constexpr, SIGN: tl.constexpr, EVEN: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr, SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """(rows of x2 S^T, rows of y2 dS^T, sum over the other axis' channels of S * dS [BD]), before any own decay."""
    from_start = tl.zeros([64, BD], tl.float32)
    from_end = tl.zeros([64, BD], tl.float32)
    through = tl.zeros([BD], tl.float32)
    WIDTH: tl.constexpr = (D2 + B2 - 1) // B2 * B2
    for n in tl.range(0, (2 * SPLIT - 1) * WIDTH, B2, num_stages=STAGES):
        c2, left, right = term_at(n, index, WIDTH, SPLIT)
        S = load_state(starts, right, col, c2, D, D2, STRIDE, STRIDE2, BD, B2)  # [BD, B2]
        bx2 = other_rows(x2, token, rows, left, head, c2, True, H, HX2, D2, P2, B2, SIGN, EVEN)
        if ends is not None:
            dS = load_state(ends, left, col, c2, D, D2, STRIDE, STRIDE2, BD, B2)
            by2 = other_rows(y2, token, rows, right, head, c2, True, H, HY2, D2, P2, B2, SIGN, EVEN)
        from_start = dot(bx2, tl.trans(S), from_start, DT, PREC)
        if ends is not None:
            from_end = dot(by2, tl.trans(dS), from_end, DT, PREC)
            product = S.to(tl.float32) * dS.to(tl.float32)
            if chunk_decay2 is not None:
                product *= tl.load(chunk_decay2 + index * P2 + c2 + tl.arange(0, B2))[None, :]
            through += tl.sum(product, 1)
    return rows_of_tile(from_start), rows_of_tile(from_end), through


@triton.jit(noinline=True)
def _axis_of_chunk(
    x, y, g, gs, gamma, M, within_blocks, block_decays, x2, y2, chunk_decay2, starts, ends, token, rows, seq, head,
    index, col, scale,
    dx, dy, dg,
    H: tl.constexpr, HX: tl.constexpr, HY: tl.constexpr, HG: tl.constexpr, HGS: tl.constexpr, HX2: tl.constexpr,
    HY2: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, P2: tl.constexpr, BD: tl.constexpr, B2: tl.constexpr,
    STRIDE: tl.constexpr, STRIDE2: tl.constexpr, SIGN: tl.constexpr, EVEN: tl.constexpr, PREC: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr, STATES_FIRST: tl.constexpr,
):  # fmt: skip
    """`gated_axis` of one chunk. A call of its own, as in `gated_rows`: 48 bytes are spilled for 184, but ptxas waits for each
    product of the tensor cores by itself."""
    C: tl.constexpr = 64
    DT: tl.constexpr = M.dtype.element_ty
    M += index * (SPLIT * C * C)
    blk = tl.arange(0, 8)[None, :]
    c = col + tl.arange(0, BD)[:, None]
    py = y + (token * HY + head // (H // HY)) * D + (blk * (8 * SIGN * HY * D) + c)  # [BD, 8]
    px = py
    if x is not None:
        px = x + (token * HX + head // (H // HX)) * D + (blk * (8 * SIGN * HX * D) + c)
    pg = g + (token * HG + head // (H // HG)) * D + (blk * (8 * SIGN * HG * D) + c)
    pm = within_blocks + index * 512 + (blk * 64 + (c - c))  # [BD, 8]: the same address in every channel, to keep the layout
    xs = ()
    ys = ()
    es = ()
    for t in tl.static_range(8):
        log = row_of_blocks(pg + t * (SIGN * HG * D), blk * 8 + t, rows, c, D, BD, EVEN)
        if gs is not None:
            at = gs + token * HGS + head // (H // HGS) + (blk * 8 + t) * (SIGN * HGS)
            log += tl.load(at, mask=blk * 8 + t < rows, other=0.0).to(tl.float32)
        if gamma is not None:
            log += tl.where(blk * 8 + t < rows, tl.load(gamma + seq * H + head).to(tl.float32), 0.0)
        es = es + (exp_of_log(log),)
        if x is not None:
            xs = xs + (row_of_blocks(px + t * (SIGN * HX * D), blk * 8 + t, rows, c, D, BD, EVEN),)
        else:  # everything that would come of it falls away
            xs = xs + (tl.zeros([BD, 8], tl.float32),)
        ys = ys + (row_of_blocks(py + t * (SIGN * HY * D), blk * 8 + t, rows, c, D, BD, EVEN),)
    if STATES_FIRST:
        start_rows, end_rows, through = _from_states(
            x2, y2, chunk_decay2, starts, ends, token, rows, index, head, col, H, HX2, HY2, D, D2, P2, BD, B2, STRIDE, STRIDE2,
            SIGN, EVEN, DT, PREC, SPLIT, STAGES,
        )  # fmt: skip
    dxs, dys, dgs = _within_blocks_one_by_one(pm, xs, ys, es)
    pre = (es[0],)
    suf = (tl.full([BD, 8], 1.0, tl.float32),)
    for t in tl.static_range(1, 8):
        pre = pre + (pre[t - 1] * es[t],)
        suf = (suf[0] * es[8 - t],) + suf
    # Decays of whole blocks: between a row's block and its half of 16, 32 and 64 rows.
    before = tl.full([BD, 8], 1.0, tl.float32)
    after = tl.full([BD, 8], 1.0, tl.float32)
    far16 = tl.full([BD, 8], 1.0, tl.float32)
    far32 = tl.full([BD, 8], 1.0, tl.float32)
    through_all = tl.full([BD, 8], 1.0, tl.float32)
    for n in tl.static_range(8):
        decay = tl.load(block_decays + (index * 8 + n) * D + c + blk * 0, mask=c < D, other=1.0)
        through_all *= decay
        before *= tl.where(blk > n, decay, 1.0)
        after *= tl.where(blk < n, decay, 1.0)
        far16 *= tl.where(between(blk, n, 1), decay, 1.0)
        far32 *= tl.where(between(blk, n, 2), decay, 1.0)
    # Levels of 8, 16 and 32 rows: upper blocks read, lower ones are read.
    r = tl.arange(0, C)
    scores = M + (r[:, None] * C + r[None, :])
    apart = (r & 7)[:, None] ^ (r & 7)[None, :]
    for level in tl.static_range(3):
        upper = ((blk >> level) & 1) == 1
        far = 1.0
        if level == 1:
            far = far16
        if level == 2:
            far = far32
        own = ()
        own_low = ()
        for t in tl.static_range(8):
            row = tl.where(upper, xs[t], ys[t]) * (tl.where(upper, pre[t], suf[t]) * far)
            own = own + (row.to(DT),)
            own_low = own_low + (low_part(row, row.to(DT)),)
        here = (apart >> level) == 1
        of_level = tl.load(scores, mask=here, other=0.0)
        if SPLIT == 2:
            of_low = tl.load(scores + C * C, mask=here, other=0.0)
            found = dot_split(of_level, of_low, tile_of_rows(own), tile_of_rows(own_low), None)
        else:
            found = dot(of_level, tile_of_rows(own), None, DT, PREC)
        found = rows_of_tile(found)
        dxs, dys, dgs, reading, being_read = _add_level(found, upper, far, xs, ys, pre, suf, dxs, dys, dgs)
        if level == 1:
            reading16 = reading
            being_read16 = being_read
    sum16 = reading16 + being_read16  # a block is upper or lower, so one of the two is 0
    of_levels = of_blocks(sum16, reading + being_read, BD)
    whole = tl.zeros([BD, 8], tl.float32)
    for n in tl.static_range(8):
        of16, of32 = tl.split(of_levels[n])
        whole += tl.where(between(n, blk, 1), of16[:, None], 0.0) + tl.where(between(n, blk, 2), of32[:, None], 0.0)
    if not STATES_FIRST:
        start_rows, end_rows, through = _from_states(
            x2, y2, chunk_decay2, starts, ends, token, rows, index, head, col, H, HX2, HY2, D, D2, P2, BD, B2, STRIDE, STRIDE2,
            SIGN, EVEN, DT, PREC, SPLIT, STAGES,
        )  # fmt: skip
    # The states are a level whose lower half is everything before the rows, or whose upper half is everything after them.
    dxs, dgs, starting = _add_start(start_rows, before * scale, xs, pre, dxs, dgs)
    dys, dgs, ending = _add_end(end_rows, after, ys, suf, dys, dgs)
    # The decays of a whole block n also count in what other blocks read and have read across it.
    of_states = of_blocks(starting, ending, BD)
    for n in tl.static_range(8):
        started, ended = tl.split(of_states[n])
        whole += tl.where(blk < n, started[:, None], 0.0) + tl.where(blk > n, ended[:, None], 0.0)
    # The detour through a join keeps the layout of S from spreading over all rows.
    whole += tl.split(tl.join(through, through))[0][:, None] * through_all
    at = (token * H + head) * D + (blk * (8 * SIGN * H * D) + c)
    for t in tl.static_range(8):
        step = t * (SIGN * H * D)
        if dx is not None:
            store_row_of_blocks(dx + at + step, dxs[t], blk * 8 + t, rows, c, D, BD, EVEN)
        if dy is not None:
            store_row_of_blocks(dy + at + step, dys[t], blk * 8 + t, rows, c, D, BD, EVEN)
        if dg is not None:
            store_row_of_blocks(dg + at + step, dgs[t] + whole, blk * 8 + t, rows, c, D, BD, EVEN)


@triton.jit
def gated_axis(
    x, y, g, gs, gamma, M, within_blocks, block_decays, x2, y2, chunk_decay2, starts, ends, chunks, weak, scale, T, NT,
    COUNT, filled_dx, filled_dy, filled_dg,
    dx, dy, dg,
    H: tl.constexpr, HX: tl.constexpr, HY: tl.constexpr, HG: tl.constexpr, HGS: tl.constexpr, HX2: tl.constexpr,
    HY2: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, P2: tl.constexpr, BD: tl.constexpr, B2: tl.constexpr,
    STRIDE: tl.constexpr, STRIDE2: tl.constexpr, SIGN: tl.constexpr, EVEN: tl.constexpr, PREC: tl.constexpr,
    SPLIT: tl.constexpr, STAGES: tl.constexpr, STATES_FIRST: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Programs: tiles of BD own channels * groups of GROUP of COUNT chunks * heads.

    Chunks that are `weak` were done before, in the same memory. Forward (value channels): x, ends, dy and dg are None, dx is
    the output.

    M [chunks, H, SPLIT, 64, 64]: the other axis' scores, symmetric, in block order; within_blocks: those inside blocks of 8
    rows (`scores_in_blocks`, `stored_scores_in_blocks`). block_decays [chunks, H, 8, D]: each block's decay.

    x2, y2 [tokens, heads, D2], or, where the other axis has a gate, [chunks, H, 2, 64, P2] with its decays in them, and
    chunk_decay2 [chunks, H, P2] its decay over a chunk (`gated_rows`); P2 is 0 where it has none.

    starts, ends [chunks, H, SPLIT, K, V]: state before, adjoint after each chunk; STRIDE and STRIDE2 are the own and the
    other channel's strides in them. dx, dy, dg [tokens, H, D]. STATES_FIRST: their products come before the scores, which
    costs registers and hides the time of a long loop over them. filled_*: memory shared with the outputs.
    """
    TILES: tl.constexpr = (D + BD - 1) // BD
    tile, head, unit = program_at(TILES, H)
    first = unit * GROUP
    if all_weak(weak, first, head, COUNT, H, GROUP):
        return
    for n in range(GROUP):
        s = first + n
        if s < COUNT:
            token, rows, seq = chunk_at(chunks, s, T, NT, 64, SIGN)
            index = s.to(tl.int64) * H + head
            if (rows > 0) & (tl.load(weak + index) == 0):
                _axis_of_chunk(
                    x, y, g, gs, gamma, M, within_blocks, block_decays, x2, y2, chunk_decay2, starts, ends, token, rows,
                    seq, head, index, tile * BD, scale, dx, dy, dg, H, HX, HY, HG, HGS, HX2, HY2, D, D2, P2, BD, B2, STRIDE,
                    STRIDE2, SIGN, EVEN, PREC, SPLIT, STAGES, STATES_FIRST,
                )  # fmt: skip
