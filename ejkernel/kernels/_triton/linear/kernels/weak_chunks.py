"""Weakly gated chunks of 64 rows, bfloat16: the short form of `gated_rows` and `gated_axis`.

Where a chunk's log decays add up to at most LIMIT in every channel, the decay between rows s <= t can be divided in the middle
of the chunk for all of them at once: with c the running sum of log decays and m half of its last value,

    exp(c_t - c_s) = exp(c_t - m) exp(m - c_s),    both factors between exp(-LIMIT / 2) and exp(LIMIT / 2),

which is what is tested (by `find_weak_chunks` with the sizes of the log decays, which is more than needed). So nothing
overflows, nothing is lost to rounding that bfloat16 would keep, and a chunk's scores are one product instead of a tree of them.
The gate's gradient is then a reverse running sum of `x dx - y dy`. Which chunks are weakly gated is found on the device; all
others (a reset, -inf) are left to the exact tree.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ejkernel.kernels._triton.linear.kernels.other_axis import other_rows
from ejkernel.kernels._triton.linear.kernels.tiles import (
    LOG2_E,
    channel_log_decay,
    chunk_at,
    clamped,
    dot,
    dot_split,
    exp2_of_log,
    exp_of_log,
    load_rows,
    load_state,
    low_part,
    onwards,
    program_at,
    store_rows,
    store_split,
    sums,
    term_at,
)


@triton.jit
def from_middle(logs, GATE_PARTS: tl.constexpr):
    """(c - m in base 2 [C, BD], exp(m) [BD]) of log decays [C, BD]."""
    r = tl.arange(0, logs.shape[0])
    halves = tl.where(r[None, :] <= r[:, None], 0.5, -0.5).to(tl.bfloat16)  # half of what is before less half of what is after
    return sums(halves, logs, GATE_PARTS) * LOG2_E, tl.exp(tl.sum(logs, 0) * 0.5)


@triton.jit
def find_weak_chunks(
    g, chunks, T, NT,
    weak, block_decays,
    H: tl.constexpr, HG: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, SIGN: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Programs: chunks * heads. What `weak_rows` and `gated_rows` find of log decays g per channel alone.

    weak [chunks, H]: 1 where the chunk is weakly gated, else 0. block_decays [chunks, H, 8, D]: the decay of each block of 8
    rows.
    """
    s = tl.program_id(0)
    head = tl.program_id(1)
    token, rows, _ = chunk_at(chunks, s, T, NT, 64, SIGN)
    index = s.to(tl.int64) * H + head
    span = 0.0
    if rows > 0:
        g += (token * HG + head // (H // HG)) * D
        r = tl.arange(0, 8)[:, None, None] * 8 + tl.arange(0, 8)[None, :, None]
        for col in range(0, D, BD):
            c = col + tl.arange(0, BD)
            logs = tl.load(g + (r * (SIGN * HG * D) + c), mask=(r < rows) & (c < D), other=0.0).to(tl.float32)
            logs = clamped(logs)
            span = tl.maximum(span, tl.max(tl.sum(tl.sum(tl.abs(logs), 1), 0), 0))
            at = block_decays + (index * 8 + tl.arange(0, 8)[:, None]) * D + c[None, :]
            tl.store(at, exp_of_log(tl.sum(logs, 1)), mask=(c < D)[None, :])
    tl.store(weak + index, (span <= LIMIT).to(tl.int32))


@triton.jit
def weak_rows(
    q, k, g, gs, gamma, chunks, done, scale, T, NT,
    A, A_low, qd, kd, M, M_low, kp, chunk_decay, weak,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HG: tl.constexpr, HGS: tl.constexpr, K: tl.constexpr,
    KP: tl.constexpr, BK: tl.constexpr, SIGN: tl.constexpr, EVEN: tl.constexpr, GATE_PARTS: tl.constexpr, SPLIT: tl.constexpr,
    LIMIT: tl.constexpr,
):  # fmt: skip
    """Programs: chunks * heads. `gated_rows` for weakly gated chunks.

    weak [chunks, H]: 1 where the chunk is, else 0: what is left of it then may be anything, and `gated_rows` writes over it.
    A chunk that decays too far is left at the first turn over its channels that shows it, when all that the turn reads is
    there: looking at the gates first would be one wait more. (Where log decays above 0 go too far on the way, it is seen at
    the end.)

    done [chunks, H]: not 0 where `key_gate_scan_by_warpgroups` needs no rows, else None.
    M, M_low, kp: what A, A_low and qd are of queries, of keys in their place with a scale of 1; None where nobody asks. With
    them the scores' blocks of 16 x 16 above the diagonal are not written.
    """
    C: tl.constexpr = 64
    DT: tl.constexpr = kd.dtype.element_ty
    s = tl.program_id(0)  # chunks before heads, other than everywhere else: measured faster here
    head = tl.program_id(1)
    token, rows, seq = chunk_at(chunks, s, T, NT, C, SIGN)
    index = s.to(tl.int64) * H + head
    if rows <= 0:
        tl.store(weak + index, 1)
        return
    if done is not None:
        if tl.load(done + index) != 0:
            tl.store(weak + index, 1)
            return
    r = tl.arange(0, C)
    scores = tl.zeros([C, C], tl.float32)
    of_keys = tl.zeros([C, C], tl.float32)
    span = tl.zeros([C], tl.float32)
    for col in tl.static_range(0, KP, BK):  # unrolled, since a loop cannot be left
        bk = load_rows(k, token, rows, head // (H // HK), col, HK, K, C, BK, SIGN, EVEN, KP)
        if q is not None:
            bq = load_rows(q, token, rows, head // (H // HQ), col, HQ, K, C, BK, SIGN, EVEN, KP)
        logs = channel_log_decay(g, gs, gamma, token, rows, seq, head, col, True, H, HG, HGS, K, C, BK, SIGN, EVEN, KP)
        total = tl.sum(logs, 0)
        if tl.min(total, 0) < -LIMIT:
            tl.store(weak + index, 0)
            return
        half = tl.exp(total * 0.5)
        c, _ = from_middle(logs, GATE_PARTS)
        span = tl.maximum(span, tl.max(tl.abs(c), 1))
        if kp is not None:
            read = bk.to(tl.float32) * exp2_of_log(c)
        bk = bk.to(tl.float32) * exp2_of_log(-c)
        at = r[:, None] * KP + (col + tl.arange(0, BK))[None, :]
        store_split(kd, index * SPLIT, C * KP, at, bk * half[None, :], SPLIT)
        if kp is not None:
            store_split(kp, index * SPLIT, C * KP, at, read * half[None, :], SPLIT)
            of_keys = dot(read, tl.trans(bk), of_keys, tl.float32, "tf32")
        if q is not None:
            bq = bq.to(tl.float32) * exp2_of_log(c)
            store_split(qd, index * SPLIT, C * KP, at, bq * (half * scale)[None, :], SPLIT)
            # Operands with tf32's 10 bits, rounded: in bfloat16 they would cost as much as all the A_low.
            scores = dot(bq, tl.trans(bk), scores, tl.float32, "tf32")
        tl.store(chunk_decay + index * KP + col + tl.arange(0, BK), half * half)
    at = index * (C * C) + (r[:, None] * C + r[None, :])
    inside = None
    if kp is not None:
        inside = (r // 16)[:, None] >= (r // 16)[None, :]  # nobody reads blocks of 16 x 16 above the diagonal
    if q is not None:
        scores = tl.where(r[:, None] >= r[None, :], scores * scale, 0.0)
        tl.store(A + at, scores.to(DT), mask=inside)
        if A_low is not None:
            tl.store(A_low + at, low_part(scores, scores.to(DT)), mask=inside)
    if kp is not None:
        of_keys = tl.where(r[:, None] >= r[None, :], of_keys, 0.0)
        tl.store(M + at, of_keys.to(DT), mask=inside)
        tl.store(M_low + at, low_part(of_keys, of_keys.to(DT)), mask=inside)
    tl.store(weak + index, (tl.max(span, 0) <= LIMIT * (0.5 * LOG2_E)).to(tl.int32))


@triton.jit
def _passed(S, dS, chunk_decay2, index, c2, P2: tl.constexpr, B2: tl.constexpr):
    """[BD]: what passes through the chunk, of states [BD, B2] before and adjoints after it, times the other axis' decay."""
    product = S.to(tl.float32) * dS.to(tl.float32)
    if chunk_decay2 is not None:
        product *= tl.load(chunk_decay2 + index * P2 + c2 + tl.arange(0, B2))[None, :]
    return tl.sum(product, 1)


@triton.jit
def weak_axis(
    x, y, g, gs, gamma, A2, A2_low, x2, y2, chunk_decay2, starts, ends, weak, chunks, scale, T, NT,
    dx, dy, dg,
    H: tl.constexpr, HX: tl.constexpr, HY: tl.constexpr, HG: tl.constexpr, HGS: tl.constexpr, HX2: tl.constexpr,
    HY2: tl.constexpr, D: tl.constexpr, D2: tl.constexpr, P2: tl.constexpr, BD: tl.constexpr, B2: tl.constexpr,
    STRIDE: tl.constexpr, STRIDE2: tl.constexpr, SIGN: tl.constexpr, EVEN: tl.constexpr, PREC: tl.constexpr,
    SPLIT: tl.constexpr, GATE_PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs: tiles of BD own channels * chunks * heads. `gated_axis` for weakly gated chunks.

    A2, A2_low [chunks, H, 64, 64]: the other axis' scores, high and low part, where it has a gate (P2 > 0), else None: they are
    x2 y2^T.
    """
    C: tl.constexpr = 64
    DT: tl.constexpr = starts.dtype.element_ty
    TILES: tl.constexpr = (D + BD - 1) // BD
    tile, head, s = program_at(TILES, H)
    col = tile * BD
    token, rows, seq = chunk_at(chunks, s, T, NT, C, SIGN)
    index = s.to(tl.int64) * H + head
    if rows <= 0:
        return
    if tl.load(weak + index) == 0:
        return
    r = tl.arange(0, C)
    M = tl.zeros([C, C], tl.float32)  # the other axis' scores
    ax = tl.zeros([C, BD], tl.float32)  # adjoint of x exp(c - m): from the state before the chunk, then from the scores
    ay = tl.zeros([C, BD], tl.float32)  # adjoint of y exp(m - c)
    through = tl.zeros([BD], tl.float32)
    if A2 is not None:
        at = index * (C * C) + (r[:, None] * C + r[None, :])
        M += tl.load(A2 + at).to(tl.float32) + tl.load(A2_low + at).to(tl.float32)
    WIDTH: tl.constexpr = (D2 + B2 - 1) // B2 * B2
    for n in tl.range(0, (2 * SPLIT - 1) * WIDTH, B2, num_stages=STAGES):
        c2, left, right = term_at(n, index, WIDTH, SPLIT)
        bx2 = other_rows(x2, token, rows, left, head, c2, False, H, HX2, D2, P2, B2, SIGN, EVEN)  # [C, B2]
        if dy is not None:
            by2 = other_rows(y2, token, rows, right, head, c2, False, H, HY2, D2, P2, B2, SIGN, EVEN)
            if A2 is None:
                M = dot(bx2, tl.trans(by2), M, DT, PREC)
        S = load_state(starts, right, col, c2, D, D2, STRIDE, STRIDE2, BD, B2)  # [BD, B2]
        ax = dot(bx2, tl.trans(S), ax, DT, PREC)
        if dy is not None:
            dS = load_state(ends, left, col, c2, D, D2, STRIDE, STRIDE2, BD, B2)
            ay = dot(by2, tl.trans(dS), ay, DT, PREC)
            if dg is not None:
                through += _passed(S, dS, chunk_decay2, index, c2, P2, B2)
    # Scores and rows as high and low part: each rounding alone would add an error like the result's own.
    M = tl.where(r[:, None] >= r[None, :], M, 0.0) * scale
    M_low = low_part(M, M.to(DT))
    M = M.to(DT)
    c, half = from_middle(
        channel_log_decay(g, gs, gamma, token, rows, seq, head, col, True, H, HG, HGS, D, C, BD, SIGN, EVEN), GATE_PARTS
    )  # [C, BD], [BD]
    fy = load_rows(y, token, rows, head // (H // HY), col, HY, D, C, BD, SIGN, EVEN).to(tl.float32) * exp2_of_log(-c)
    if dy is not None:
        ay *= half[None, :]
    if dg is not None:
        everything = through * half * half + tl.sum(fy * ay, 0)
    ax = dot_split(M, M_low, fy.to(DT), low_part(fy, fy.to(DT)), ax * (half * scale)[None, :])
    if dy is not None:
        fx = load_rows(x, token, rows, head // (H // HX), col, HX, D, C, BD, SIGN, EVEN).to(tl.float32) * exp2_of_log(c)
        ay = dot_split(tl.trans(M), tl.trans(M_low), fx.to(DT), low_part(fx, fx.to(DT)), ay)
        if dg is not None:
            # The decay of row j is in what every row t >= j reads and in what is read of every row s < j. A pair (t, s) counts
            # at t and, negative, at s, by products that differ by 2^-17: from rows before both that is all that is left of it.
            found = sums(onwards(C), fx * ax - fy * ay, 2) + everything[None, :]
            store_rows(dg, found, token, rows, head, col, H, D, C, BD, SIGN, EVEN)
        store_rows(dy, exp2_of_log(-c) * ay, token, rows, head, col, H, D, C, BD, SIGN, EVEN)
    if dx is not None:
        store_rows(dx, exp2_of_log(c) * ax, token, rows, head, col, H, D, C, BD, SIGN, EVEN)
