"""Chunks with a decay for every key channel, every value channel, or both: any dtype and length, parallel over chunks.

With R_l the rows of an axis at level l of the dyadic tree (right halves of 2^(l+1)-blocks hold queries times the decays up to
them, left halves keys times the decays after them), the scores that meet at level l are mask_l * (R_l R_l^T). Any two rows meet
at exactly one level, so one matrix holds the scores of an axis (`gated_scores`). An axis is one of

    key channels     x = q,  y = k     -> dx = dq, dy = dk, gradient of the key gate       other scores: scale do v^T
    value channels   x = do, y = v     -> dx = o,  dy = dv, gradient of the value gate     other scores: scale q k^T

and the same formula gives all of them: dR_l = (mask_l * other scores) R_l, whose query rows add to dx and whose key rows to dy,
both times their own decay. States enter as one more level that spans the chunk. The gate's gradient adds dR_l * R_l over the
rows that a decay spans: additions only. `general_gated_axis` does this for an axis with a gate, `ungated_axis` for one without,
where the levels fall together.

Tiles of a gated axis are transposed, [channels, rows]: then everything that is computed per channel and row is the left,
register operand of the next product, and the right operands are the [rows, rows] masks and scores.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ejkernel.kernels._triton.linear.kernels.tiles import (
    after,
    before,
    channel_log_decay,
    chunk_at,
    dot,
    load_rows,
    load_state,
    onwards,
    program_at,
    store_rows,
    sums,
    upto,
)


@triton.jit
def _spans(level, TRANSPOSED: tl.constexpr, C: tl.constexpr):
    """[C, C] of 0/1: which rows' decays row t takes in at a level, inside its own block of 2^level rows.

    In odd blocks (the right halves, read by queries) those up to t; in even ones (the left halves, keys) those after t.
    Element [t, j], or [j, t] when TRANSPOSED. Built anew at each level: loads from a table would take longer.
    """
    if TRANSPOSED:
        t = tl.arange(0, C)[None, :]
        j = tl.arange(0, C)[:, None]
    else:
        t = tl.arange(0, C)[:, None]
        j = tl.arange(0, C)[None, :]
    odd = (t >> level) & 1
    taken = tl.where(odd == 1, j <= t, j > t) & ((t >> level) == (j >> level))
    return tl.where(taken, 1.0, 0.0).to(tl.bfloat16)


@triton.jit
def _as_product(x, C: tl.constexpr, DT: tl.constexpr):
    """x [BD, C], made by a product with the identity where that is exact.

    It then lies in registers as products do. Left to itself, the compiler keeps it as it was loaded and moves it through
    shared memory at every level.
    """
    if DT == tl.bfloat16:
        r = tl.arange(0, C)
        return tl.dot(x.to(DT), tl.where(r[:, None] == r[None, :], 1.0, 0.0).to(DT)).to(DT)
    else:
        return x


@triton.jit
def _split_in_three(logs):
    """Three bfloat16 parts whose sum is `logs`."""
    first = logs.to(tl.bfloat16)
    left = logs - first.to(tl.float32)
    second = left.to(tl.bfloat16)
    return first, second, (left - second.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def _decay(first, second, third, which, GATE_PARTS: tl.constexpr):
    """exp(logs which) [BD, C] for log decays [BD, C] in parts: exact sums over just the rows that `which` [C, C] names."""
    total = tl.dot(first, which)
    if GATE_PARTS > 1:
        total = tl.dot(second, which, total)
    if GATE_PARTS > 2:
        total = tl.dot(third, which, total)
    return tl.exp(total)


@triton.jit
def gated_scores(
    x, y, g, gs, gamma, chunks, scale, T, NT,
    A,
    H: tl.constexpr, HX: tl.constexpr, HY: tl.constexpr, HG: tl.constexpr, HGS: tl.constexpr, FOLD: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, C: tl.constexpr, LEVELS: tl.constexpr, SIGN: tl.constexpr, EVEN: tl.constexpr,
    DT: tl.constexpr, PREC: tl.constexpr, GATE_PARTS: tl.constexpr,
):  # fmt: skip
    """Programs: chunks * heads. A [chunks, H, C, C]: scale * sum over channels of x_t y_s (decay from s to t); 0 for s > t."""
    _, head, s = program_at(1, H)
    token, rows, seq = chunk_at(chunks, s, T, NT, C, SIGN)
    if rows <= 0:
        return
    t = tl.arange(0, C)[:, None]
    u = tl.arange(0, C)[None, :]
    M = tl.zeros([C, C], tl.float32)
    for col in range(0, D, BD):
        bx = tl.trans(load_rows(x, token, rows, head // (H // HX), col, HX, D, C, BD, SIGN, EVEN))  # [BD, C]
        by = tl.trans(load_rows(y, token, rows, head // (H // HY), col, HY, D, C, BD, SIGN, EVEN))
        logs = tl.trans(channel_log_decay(g, gs, gamma, token, rows, seq, head, col, FOLD, H, HG, HGS, D, C, BD, SIGN, EVEN))
        p1, p2, p3 = _split_in_three(logs)
        same = tl.sum(bx.to(tl.float32) * by.to(tl.float32), 0)  # [C]: a row with itself, nothing decays
        M += tl.where(t == u, same[None, :], 0.0)
        for level in range(LEVELS):
            R = tl.where(((u >> level) & 1) == 1, bx, by).to(tl.float32)
            R = (R * _decay(p1, p2, p3, _spans(level, True, C), GATE_PARTS)).to(DT)  # [BD, C]
            M += tl.where(((t >> level) ^ (u >> level)) == 1, dot(tl.trans(R), R, None, DT, PREC), 0.0)
    at = A + (s.to(tl.int64) * H + head) * (C * C) + (t * C + u)
    tl.store(at, tl.where(t >= u, M * scale, 0.0).to(A.dtype.element_ty))


@triton.jit
def _other_scores(
    A2, x2, y2, token, rows, index, head, part, scale_scores, H: tl.constexpr, HX2: tl.constexpr, HY2: tl.constexpr,
    D2: tl.constexpr, B2: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr, SIGN: tl.constexpr, EVEN: tl.constexpr,
    DT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """[C, C]: scale_scores * A2, or, where the other axis has no gate and A2 is None, scale_scores * x2 y2^T.

    A2 [.., PARTS * C, PARTS * C] holds the whole chunk's; these are the scores inside one part of it.
    """
    if A2 is not None:
        WIDTH: tl.constexpr = PARTS * C
        corner = A2 + index * (WIDTH * WIDTH) + part * (C * WIDTH + C)
        M = tl.load(corner + (tl.arange(0, C)[:, None] * WIDTH + tl.arange(0, C)[None, :])).to(tl.float32)
    else:
        M = tl.zeros([C, C], tl.float32)
        for c in range(0, D2, B2):
            bx2 = load_rows(x2, token, rows, head // (H // HX2), c, HX2, D2, C, B2, SIGN, EVEN)
            by2 = load_rows(y2, token, rows, head // (H // HY2), c, HY2, D2, C, B2, SIGN, EVEN)
            M = dot(bx2, tl.trans(by2.to(DT)), M, DT, PREC)
    return M * scale_scores


@triton.jit
def general_gated_axis(
    x, y, g, x2, y2, g2, A2, gs, gamma, starts, ends, chunks, scale, scale_scores, T, NT,
    dx, dy, dg,
    H: tl.constexpr, HX: tl.constexpr, HY: tl.constexpr, HG: tl.constexpr, HX2: tl.constexpr, HY2: tl.constexpr,
    HG2: tl.constexpr, HGS: tl.constexpr, FOLD: tl.constexpr, FOLD2: tl.constexpr, D: tl.constexpr, D2: tl.constexpr,
    BD: tl.constexpr, B2: tl.constexpr, TILES: tl.constexpr, STRIDE: tl.constexpr, STRIDE2: tl.constexpr, C: tl.constexpr,
    PARTS: tl.constexpr, LEVELS: tl.constexpr, SIGN: tl.constexpr, EVEN: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr,
    GATE_PARTS: tl.constexpr, STAGES: tl.constexpr, STRICT: tl.constexpr,
):  # fmt: skip
    """Programs: parts * groups of TILES own tiles * chunks * heads. Forward: x, ends, dy and dg are None, dx is the output.

    A chunk of PARTS * C rows is done in PARTS (1 or 2) parts of C rows, each from the states at its own ends: the state in
    the middle of a chunk is made from the one at the chunk's end and the other part's rows.
    A2 [chunks, H, PARTS * C, PARTS * C]: the other axis' scores, or None where it has no gate. starts, ends
    [chunks, H, K, V]: state before, adjoint after each chunk; STRIDE and STRIDE2 are the own and the other channel's
    strides in them. dx, dy [tokens, H, D]; dg [tokens, H, D] is the gradient of the axis' log decays. STRICT: no row has a
    score with itself. With dy but without ends the adjoint after the chunk is 0.
    """
    GROUPS: tl.constexpr = (D + BD * TILES - 1) // (BD * TILES)
    part_and_group, head, s = program_at(PARTS * GROUPS, H)
    part = part_and_group % PARTS
    group = part_and_group // PARTS
    token, rows, seq = chunk_at(chunks, s, T, NT, PARTS * C, SIGN)
    there = token + SIGN * C * (1 - part)  # the other part, where there are two
    rows_there = tl.minimum(tl.maximum(rows - C * (1 - part), 0), C)
    token += SIGN * C * part
    rows = tl.minimum(rows - C * part, C)
    if rows <= 0:
        return
    index = s.to(tl.int64) * H + head
    t = tl.arange(0, C)[:, None]
    u = tl.arange(0, C)[None, :]
    M = _other_scores(
        A2, x2, y2, token, rows, index, head, part, scale_scores, H, HX2, HY2, D2, B2, C, PARTS, SIGN, EVEN, DT, PREC
    )
    same = tl.sum(tl.where(t == u, M, 0.0), 0)  # [C]: scores of a row with itself, which nothing decays
    if STRICT:
        same *= 0.0
    M = tl.where(t > u, M, 0.0)
    M = (M + tl.trans(M)).to(DT)  # symmetric: the same score at (t, s) and (s, t)
    for tile in range(TILES):
        col = (group * TILES + tile) * BD
        by = tl.trans(load_rows(y, token, rows, head // (H // HY), col, HY, D, C, BD, SIGN, EVEN))  # [BD, C]
        by = _as_product(by, C, DT)
        if dy is not None:
            bx = tl.trans(load_rows(x, token, rows, head // (H // HX), col, HX, D, C, BD, SIGN, EVEN))  # [BD, C]
            bx = _as_product(bx, C, DT)
        logs = tl.trans(channel_log_decay(g, gs, gamma, token, rows, seq, head, col, FOLD, H, HG, HGS, D, C, BD, SIGN, EVEN))
        total = tl.exp(tl.sum(logs, 1))  # [BD]
        p1, p2, p3 = _split_in_three(logs)
        if PARTS == 2:
            # Part 1 starts from the state after part 0's keys, part 0 ends at the adjoint before part 1's queries.
            if (dy is None) or (part == 1):
                passed = load_rows(y, there, rows_there, head // (H // HY), col, HY, D, C, BD, SIGN, EVEN).to(tl.float32)
            else:
                passed = (
                    load_rows(x, there, rows_there, head // (H // HX), col, HX, D, C, BD, SIGN, EVEN).to(tl.float32) * scale
                )
            logs = tl.trans(
                channel_log_decay(g, gs, gamma, there, rows_there, seq, head, col, FOLD, H, HG, HGS, D, C, BD, SIGN, EVEN)
            )
            total_there = tl.exp(tl.sum(logs, 1))
            o1, o2, o3 = _split_in_three(logs)
            if part == 1:
                which = before(C)
            else:
                which = onwards(C)
            passed = (tl.trans(passed) * _decay(o1, o2, o3, which, GATE_PARTS)).to(DT)  # [BD, C]
        # The states: a level whose left half is everything before the rows, or whose right half is everything after them.
        ax = tl.zeros([BD, C], tl.float32)
        ay = tl.zeros([BD, C], tl.float32)
        through = tl.zeros([BD], tl.float32)
        for c in range(0, D2, B2):
            bx2 = load_rows(x2, token, rows, head // (H // HX2), c, HX2, D2, C, B2, SIGN, EVEN)  # [C, B2]
            S = load_state(starts, index, col, c, D, D2, STRIDE, STRIDE2, BD, B2)  # [BD, B2]
            if dy is not None:
                by2 = load_rows(y2, token, rows, head // (H // HY2), c, HY2, D2, C, B2, SIGN, EVEN)
                if ends is not None:
                    dS = load_state(ends, index, col, c, D, D2, STRIDE, STRIDE2, BD, B2)
                else:
                    dS = tl.zeros([BD, B2], starts.dtype.element_ty)
            if g2 is not None:
                lg2 = channel_log_decay(g2, gs, gamma, token, rows, seq, head, c, FOLD2, H, HG2, HGS, D2, C, B2, SIGN, EVEN)
                bx2 = bx2.to(tl.float32) * tl.exp(sums(upto(C), lg2, GATE_PARTS))
                if dy is not None:
                    by2 = by2.to(tl.float32) * tl.exp(sums(after(C), lg2, GATE_PARTS))
            if PARTS == 2:
                if (dy is None) or (part == 1):
                    other = load_rows(y2, there, rows_there, head // (H // HY2), c, HY2, D2, C, B2, SIGN, EVEN).to(tl.float32)
                else:
                    other = load_rows(x2, there, rows_there, head // (H // HX2), c, HX2, D2, C, B2, SIGN, EVEN).to(tl.float32)
                kept = total_there[:, None]
                if g2 is not None:
                    lo2 = channel_log_decay(
                        g2, gs, gamma, there, rows_there, seq, head, c, FOLD2, H, HG2, HGS, D2, C, B2, SIGN, EVEN
                    )
                    if part == 1:
                        other *= tl.exp(sums(after(C), lo2, GATE_PARTS))
                    else:
                        other *= tl.exp(sums(upto(C), lo2, GATE_PARTS))
                    kept = kept * tl.exp(tl.sum(lo2, 0))[None, :]
                added = dot(passed, other, None, DT, PREC)  # [BD, B2]
                here = (part == 1).to(tl.float32)
                S = S.to(tl.float32) * (here * kept + (1.0 - here)) + here * added
                if dy is not None:
                    dS = dS.to(tl.float32) * ((1.0 - here) * kept + here) + (1.0 - here) * added
            ax = dot(S, tl.trans(bx2.to(DT)), ax, DT, PREC)
            if dy is not None:
                ay = dot(dS, tl.trans(by2.to(DT)), ay, DT, PREC)
                if dg is not None:
                    product = S.to(tl.float32) * dS.to(tl.float32)
                    if g2 is not None:
                        product *= tl.exp(tl.sum(lg2, 0))[None, :]
                    through += tl.sum(product, 1)
        ax *= _decay(p1, p2, p3, onwards(C), GATE_PARTS) * scale
        ag = tl.zeros([BD, C], tl.float32)
        if dy is not None:
            ay *= _decay(p1, p2, p3, before(C), GATE_PARTS)
        if dg is not None:
            # The decay of row j is in the prefix of every row t >= j, in the suffix of every row t < j, and in the total.
            ag += (through * total)[:, None]
            ag = dot(ax * bx.to(tl.float32), upto(C), ag, DT, PREC)
            ag = dot(ay * by.to(tl.float32), after(C), ag, DT, PREC)
        ax += same[None, :] * by.to(tl.float32)
        if dy is not None:
            ay += same[None, :] * bx.to(tl.float32)
        for level in tl.range(LEVELS, num_stages=STAGES):
            query = ((u >> level) & 1) == 1  # [1, C]
            decay = _decay(p1, p2, p3, _spans(level, True, C), GATE_PARTS)  # [BD, C]
            bxy = by
            if dy is not None:
                bxy = tl.where(query, bx, by)
            met = tl.where(((t >> level) ^ (u >> level)) == 1, M, 0.0)  # [C, C]
            dR = dot(bxy.to(tl.float32) * decay, met, None, DT, PREC) * decay  # [BD, C]
            ax += tl.where(query, dR, 0.0)
            if dy is not None:
                ay += tl.where(query, 0.0, dR)
            if dg is not None:
                ag = dot(dR * bxy.to(tl.float32), _spans(level, False, C), ag, DT, PREC)
        if dx is not None:
            store_rows(dx, tl.trans(ax), token, rows, head, col, H, D, C, BD, SIGN, EVEN)
        if dy is not None:
            store_rows(dy, tl.trans(ay), token, rows, head, col, H, D, C, BD, SIGN, EVEN)
        if dg is not None:
            store_rows(dg, tl.trans(ag), token, rows, head, col, H, D, C, BD, SIGN, EVEN)


@triton.jit
def ungated_axis(
    x, y, x2, y2, g2, A2, gs, gamma, starts, ends, chunks, scale, scale_scores, T, NT,
    dx, dy,
    H: tl.constexpr, HX: tl.constexpr, HY: tl.constexpr, HX2: tl.constexpr, HY2: tl.constexpr, HG2: tl.constexpr,
    HGS: tl.constexpr, FOLD2: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, BD: tl.constexpr, B2: tl.constexpr,
    TILES: tl.constexpr, STRIDE: tl.constexpr, STRIDE2: tl.constexpr, C: tl.constexpr, SIGN: tl.constexpr, EVEN: tl.constexpr,
    DT: tl.constexpr, PREC: tl.constexpr, GATE_PARTS: tl.constexpr,
):  # fmt: skip
    """`general_gated_axis` for an axis without a gate where the other one has one: dx = A2 y + states, dy = A2^T x + states."""
    GROUPS: tl.constexpr = (D + BD * TILES - 1) // (BD * TILES)
    group, head, s = program_at(GROUPS, H)
    token, rows, seq = chunk_at(chunks, s, T, NT, C, SIGN)
    if rows <= 0:
        return
    index = s.to(tl.int64) * H + head
    M = _other_scores(A2, x2, y2, token, rows, index, head, 0, scale_scores, H, HX2, HY2, D2, B2, C, 1, SIGN, EVEN, DT, PREC)
    M = M.to(DT)
    for tile in range(TILES):
        col = (group * TILES + tile) * BD
        from_start = tl.zeros([C, BD], tl.float32)
        from_end = tl.zeros([C, BD], tl.float32)
        for c in range(0, D2, B2):
            lg2 = channel_log_decay(g2, gs, gamma, token, rows, seq, head, c, FOLD2, H, HG2, HGS, D2, C, B2, SIGN, EVEN)
            if dx is not None:
                bx2 = load_rows(x2, token, rows, head // (H // HX2), c, HX2, D2, C, B2, SIGN, EVEN)  # [C, B2]
                S = load_state(starts, index, col, c, D, D2, STRIDE, STRIDE2, BD, B2)  # [BD, B2]
                bx2 = bx2.to(tl.float32) * tl.exp(sums(upto(C), lg2, GATE_PARTS))
                from_start = dot(bx2, tl.trans(S.to(DT)), from_start, DT, PREC)
            if dy is not None:
                by2 = load_rows(y2, token, rows, head // (H // HY2), c, HY2, D2, C, B2, SIGN, EVEN)
                dS = load_state(ends, index, col, c, D, D2, STRIDE, STRIDE2, BD, B2)
                by2 = by2.to(tl.float32) * tl.exp(sums(after(C), lg2, GATE_PARTS))
                from_end = dot(by2, tl.trans(dS.to(DT)), from_end, DT, PREC)
        if dx is not None:
            by = load_rows(y, token, rows, head // (H // HY), col, HY, D, C, BD, SIGN, EVEN)  # [C, BD]
            store_rows(dx, dot(M, by, from_start * scale, DT, PREC), token, rows, head, col, H, D, C, BD, SIGN, EVEN)
        if dy is not None:
            bx = load_rows(x, token, rows, head // (H // HX), col, HX, D, C, BD, SIGN, EVEN)
            store_rows(dy, dot(tl.trans(M), bx, from_end, DT, PREC), token, rows, head, col, H, D, C, BD, SIGN, EVEN)
