"""Chunks of 64 rows whose decays per channel are mild: the short form of `_key.prepare` and `_side.side`, bfloat16.

Where the sizes of a chunk's log decays add up to at most `MILD` in every channel, decays between rows s <= t can be divided in
the middle of the chunk for all pairs at once: with c the running sum of log decays and m half of its last value,

    exp(c_t - c_s) = exp(c_t - m) exp(m - c_s),    both factors between exp(-MILD / 2) and exp(MILD / 2),

so nothing overflows, nothing is lost to rounding that bfloat16 would keep, and a chunk's pairs are one product instead of a
tree of them. The gate's gradient is then a reverse running sum of `x dx - y dy`. Which chunks are mild is found on the device;
all others (a reset, -inf) are left to the exact tree.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ejkernel.kernels._triton.recurrent._tiles import (
    channel_log_decay,
    dot,
    dot_of_halves,
    exp_of_log,
    load_rows,
    load_state,
    nearest_tf32,
    onwards,
    program_at,
    rest_of,
    slot_at,
    store_halves,
    store_rows,
    sums,
    term_at,
    upto,
)

MILD = tl.constexpr(80.0)  # sum of |log decays|; the factors of rows lie within exp(-MILD / 2) and exp(MILD / 2)


@triton.jit
def _from_middle(logs, PIECES: tl.constexpr):
    """(c - m [C, BD], exp(m) [BD]) of log decays [C, BD]."""
    c = sums(upto(logs.shape[0]), logs, PIECES)
    m = tl.sum(logs, 0) * 0.5
    return c - m[None, :], tl.exp(m)


@triton.jit
def mild_chunks(
    g, slots, T, NT,
    mild, totals,
    H: tl.constexpr, HG: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    """Programs: slots * heads. What `mild_prepare` and `_key.prepare` find of log decays g per channel alone.

    mild [slots, H]: 1 where they are mild, else 0. totals [slots, H, 8, D]: the decay of each block of 8 rows.
    """
    s = tl.program_id(0)
    head = tl.program_id(1)
    token, rows, _ = slot_at(slots, s, T, NT, 64, SIGN)
    index = s.to(tl.int64) * H + head
    span = 0.0
    if rows > 0:
        g += (token * HG + head // (H // HG)) * D
        r = tl.arange(0, 8)[:, None, None] * 8 + tl.arange(0, 8)[None, :, None]
        for col in range(0, D, BD):
            c = col + tl.arange(0, BD)
            logs = tl.load(g + (r * (SIGN * HG * D) + c), mask=(r < rows) & (c < D), other=0.0).to(tl.float32)
            logs = tl.maximum(logs, -1e30)
            span = tl.maximum(span, tl.max(tl.sum(tl.sum(tl.abs(logs), 1), 0), 0))
            at = totals + (index * 8 + tl.arange(0, 8)[:, None]) * D + c[None, :]
            tl.store(at, exp_of_log(tl.sum(logs, 1)), mask=(c < D)[None, :])
    tl.store(mild + index, (span <= MILD).to(tl.int32))


@triton.jit
def mild_prepare(
    q, k, g, gs, gamma, slots, scale, T, NT,
    A, rest, qd, kd, tot, mild,
    H: tl.constexpr, HK: tl.constexpr, HG: tl.constexpr, HGS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BK: tl.constexpr,
    SIGN: tl.constexpr, EVEN: tl.constexpr, PIECES: tl.constexpr, HALVES: tl.constexpr,
):  # fmt: skip
    """Programs: slots * heads. `_key.prepare` for mild chunks.

    mild [slots, H]: 1 where the chunk is mild, else 0: what is left of it then may be anything, and `prepare` writes over it.
    (Looking first and returning would read the gates twice, one wait after the other.)
    """
    C: tl.constexpr = 64
    DT: tl.constexpr = kd.dtype.element_ty
    s = tl.program_id(0)  # slots before heads, other than everywhere else: measured faster here
    head = tl.program_id(1)
    token, rows, seq = slot_at(slots, s, T, NT, C, SIGN)
    index = s.to(tl.int64) * H + head
    if rows <= 0:
        tl.store(mild + index, 1)
        return
    r = tl.arange(0, C)
    pairs = tl.zeros([C, C], tl.float32)
    span = 0.0
    for col in range(0, KP, BK):
        bk = load_rows(k, token, rows, head // (H // HK), col, HK, K, C, BK, SIGN, EVEN)
        if q is not None:
            bq = load_rows(q, token, rows, head, col, H, K, C, BK, SIGN, EVEN)
        logs = channel_log_decay(g, gs, gamma, token, rows, seq, head, col, True, H, HG, HGS, K, C, BK, SIGN, EVEN)  # [C, BK]
        span = tl.maximum(span, tl.max(tl.sum(tl.abs(logs), 0), 0))
        c, half = _from_middle(logs, PIECES)
        bk = bk.to(tl.float32) * exp_of_log(-c)
        at = r[:, None] * KP + (col + tl.arange(0, BK))[None, :]
        store_halves(kd, index * HALVES, C * KP, at, bk * half[None, :], HALVES)
        if q is not None:
            bq = bq.to(tl.float32) * (exp_of_log(c) * scale)
            store_halves(qd, index * HALVES, C * KP, at, bq * half[None, :], HALVES)
            # Operands with tf32's 10 bits (Hopper cuts the others off): in bfloat16 they would cost as much as all the rest.
            if HALVES == 2:
                bq = nearest_tf32(bq)
                bk = nearest_tf32(bk)
            pairs = tl.dot(bq, tl.trans(bk), pairs, input_precision="tf32")
        tl.store(tot + index * KP + col + tl.arange(0, BK), half * half)
    if q is not None:
        pairs = tl.where(r[:, None] >= r[None, :], pairs, 0.0)
        at = index * (C * C) + (r[:, None] * C + r[None, :])
        tl.store(A + at, pairs.to(DT))
        if rest is not None:
            tl.store(rest + at, rest_of(pairs, pairs.to(DT)))
    tl.store(mild + index, (span <= MILD).to(tl.int32))


@triton.jit
def _opposite(
    x, token, rows, index, head, col, H: tl.constexpr, HEADS: tl.constexpr, D: tl.constexpr, P: tl.constexpr, BD: tl.constexpr,
    SIGN: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """[64, BD] of x [tokens, HEADS, D], or, with P > 0, of matrix `index` of prepared rows [matrices, 64, P]."""
    if P > 0:
        return tl.load(x + index * (64 * P) + (tl.arange(0, 64)[:, None] * P + (col + tl.arange(0, BD))[None, :]))
    else:
        return load_rows(x, token, rows, head // (H // HEADS), col, HEADS, D, 64, BD, SIGN, EVEN)


@triton.jit
def _passed(S, dS, tot2, index, c2, P2: tl.constexpr, B2: tl.constexpr):
    """[BD]: what passes through the chunk, of states [BD, B2] before and adjoints after it, times the opposite decay."""
    product = S.to(tl.float32) * dS.to(tl.float32)
    if tot2 is not None:
        product *= tl.load(tot2 + index * P2 + c2 + tl.arange(0, B2))[None, :]
    return tl.sum(product, 1)


@triton.jit
def mild_side(
    x, y, g, gs, gamma, A2, rest2, x2, y2, tot2, starts, ends, mild, slots, scale, T, NT,
    dx, dy, dg,
    H: tl.constexpr, HX: tl.constexpr, HY: tl.constexpr, HG: tl.constexpr, HGS: tl.constexpr, HX2: tl.constexpr,
    HY2: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, P2: tl.constexpr, BD: tl.constexpr, B2: tl.constexpr,
    STRIDE: tl.constexpr, STRIDE2: tl.constexpr, SIGN: tl.constexpr, EVEN: tl.constexpr, PREC: tl.constexpr,
    HALVES: tl.constexpr, PIECES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs: tiles of BD own channels * slots * heads. `_side.side` for mild chunks.

    A2, rest2 [slots, H, 64, 64]: the opposite pairs, in two halves, where the opposite side has a gate (P2 > 0), else None:
    they are x2 y2^T.
    """
    C: tl.constexpr = 64
    DT: tl.constexpr = starts.dtype.element_ty
    TILES: tl.constexpr = (D + BD - 1) // BD
    tile, head, s = program_at(TILES, H)
    col = tile * BD
    token, rows, seq = slot_at(slots, s, T, NT, C, SIGN)
    index = s.to(tl.int64) * H + head
    if rows <= 0:
        return
    if tl.load(mild + index) == 0:
        return
    r = tl.arange(0, C)
    M = tl.zeros([C, C], tl.float32)  # the opposite pairs
    ax = tl.zeros([C, BD], tl.float32)  # adjoint of x exp(c - m): from the state before the chunk, then from pairs
    ay = tl.zeros([C, BD], tl.float32)  # adjoint of y exp(m - c)
    through = tl.zeros([BD], tl.float32)
    if A2 is not None:
        at = index * (C * C) + (r[:, None] * C + r[None, :])
        M += tl.load(A2 + at).to(tl.float32) + tl.load(rest2 + at).to(tl.float32)
    WIDTH: tl.constexpr = (D2 + B2 - 1) // B2 * B2
    for n in tl.range(0, (2 * HALVES - 1) * WIDTH, B2, num_stages=STAGES):
        c2, left, right = term_at(n, index, WIDTH, HALVES)
        bx2 = _opposite(x2, token, rows, left, head, c2, H, HX2, D2, P2, B2, SIGN, EVEN)  # [C, B2]
        if dy is not None:
            by2 = _opposite(y2, token, rows, right, head, c2, H, HY2, D2, P2, B2, SIGN, EVEN)
            if A2 is None:
                M = dot(bx2, tl.trans(by2), M, DT, PREC)
        S = load_state(starts, right, col, c2, D, D2, STRIDE, STRIDE2, BD, B2)  # [BD, B2]
        ax = dot(bx2, tl.trans(S), ax, DT, PREC)
        if dy is not None:
            dS = load_state(ends, left, col, c2, D, D2, STRIDE, STRIDE2, BD, B2)
            ay = dot(by2, tl.trans(dS), ay, DT, PREC)
            if dg is not None:
                through += _passed(S, dS, tot2, index, c2, P2, B2)
    # Pairs and rows as bfloat16 and what that leaves of them: each rounding alone would add an error like the result's own.
    M = tl.where(r[:, None] >= r[None, :], M, 0.0) * scale
    M_rest = rest_of(M, M.to(DT))
    M = M.to(DT)
    c, half = _from_middle(
        channel_log_decay(g, gs, gamma, token, rows, seq, head, col, True, H, HG, HGS, D, C, BD, SIGN, EVEN), PIECES
    )  # [C, BD], [BD]
    fy = load_rows(y, token, rows, head // (H // HY), col, HY, D, C, BD, SIGN, EVEN).to(tl.float32) * exp_of_log(-c)
    if dy is not None:
        ay *= half[None, :]
    if dg is not None:
        everything = through * half * half + tl.sum(fy * ay, 0)
    ax = dot_of_halves(M, M_rest, fy.to(DT), rest_of(fy, fy.to(DT)), ax * (half * scale)[None, :])
    if dy is not None:
        fx = load_rows(x, token, rows, head // (H // HX), col, HX, D, C, BD, SIGN, EVEN).to(tl.float32) * exp_of_log(c)
        ay = dot_of_halves(tl.trans(M), tl.trans(M_rest), fx.to(DT), rest_of(fx, fx.to(DT)), ay)
        if dg is not None:
            # The decay of row j is in what every row t >= j reads and in what is read of every row s < j. A pair (t, s) counts
            # at t and, negative, at s, by products that differ by 2^-17: from rows before both that is all that is left of it.
            found = sums(onwards(C), fx * ax - fy * ay, 2) + everything[None, :]
            store_rows(dg, found, token, rows, head, col, H, D, C, BD, SIGN, EVEN)
        store_rows(dy, exp_of_log(-c) * ay, token, rows, head, col, H, D, C, BD, SIGN, EVEN)
    if dx is not None:
        store_rows(dx, exp_of_log(c) * ax, token, rows, head, col, H, D, C, BD, SIGN, EVEN)
