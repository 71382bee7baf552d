"""Chunks whose decay is one number per head and step (g of rank 3, g_gamma), or that do not decay.

    o  = scale ((q k^T) * D) v + scale pre * (q S)          D[t, s]: product of the decays after s up to t; 0 for s > t
    S' = (the chunk's decay) S + (k suf)^T v

`head_gate_scan` scans a segment's chunks with the state in registers and reads every input once. For states that do not fit,
`head_gate_rows` makes what `scan_rows` and `scan_rows_wide` scan (bfloat16, up to 256 key channels), or `head_gate_outputs`
does one chunk from a stored state. `head_gate_backward` does one chunk from the stored state and adjoint.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ejkernel.kernels._triton.linear.kernels.head_decays import constant_decay, decay_matrix, head_decays, not_reset
from ejkernel.kernels._triton.linear.kernels.segments import (
    chunk_in_turn,
    ends_sequence,
    rows_of_segment,
    scanned_segment,
    state_at_start,
)
from ejkernel.kernels._triton.linear.kernels.tiles import (
    chunk_at,
    dot,
    load_rows,
    load_state,
    onwards,
    program_at,
    store_rows,
    store_state,
)


@triton.jit
def head_gate_scan(
    q, k, v, gs, gamma, begin, ends, end_decay, chunks, segments, scale, T, NT, NS, SC,
    o, final, states,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, HGS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr, DECAYS: tl.constexpr,
    C: tl.constexpr, SIGN: tl.constexpr, EVEN: tl.constexpr, ADJOINT: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr,
    EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs: value tiles * segments * heads; BK >= K. states [chunks, H, K, V] (None: not kept): S before every chunk.

    STRIDE_K, STRIDE_V: of begin, ends and final, which may be stored transposed; ends' decays [.., DECAYS] are all alike.
    ADJOINT goes back in time and lets every row see the rows from it on: with (v, do, q) for (q, k, v) it gives dk, with
    (k, q, do) dv. (Not adjoint, (do, v, k) gives dq.)
    """
    GATED: tl.constexpr = (gs is not None) or (gamma is not None)
    TV: tl.constexpr = (V + BV - 1) // BV
    tile, head, unit = program_at(TV, H)
    b = tile * BV
    segment, idle = scanned_segment(segments, unit, NT, NS, SC, ADJOINT, False)
    if idle:
        return
    _g, first, count, seq, _place, _total = segment
    S = state_at_start(
        begin, ends, end_decay, None, segment, head, 0, b, ADJOINT, H, K, V, STRIDE_K, STRIDE_V, BK, BV, DECAYS
    )  # [BK, BV]
    constant = constant_decay(gamma, seq, head, H)
    t = tl.arange(0, C)[:, None]
    u = tl.arange(0, C)[None, :]
    if gs is None:  # the same in every chunk
        if gamma is not None:
            D = decay_matrix(gs, None, constant, ADJOINT, C, EXACT)
        elif ADJOINT:
            D = tl.where(t <= u, 1.0, 0.0)
        else:
            D = tl.where(t >= u, 1.0, 0.0)
    token0, rows_left = rows_of_segment(chunks, first, count, T, NT, C, SIGN)
    for n in tl.range(count, num_stages=STAGES):
        s, token, rows = chunk_in_turn(first, count, token0, rows_left, n, ADJOINT, C, SIGN)
        index = s.to(tl.int64) * H + head
        bq = load_rows(q, token, rows, head // (H // HQ), 0, HQ, K, C, BK, SIGN, EVEN)  # [C, BK]
        bk = load_rows(k, token, rows, head // (H // HK), 0, HK, K, C, BK, SIGN, EVEN)  # [C, BK]
        bv = load_rows(v, token, rows, head // (H // HV), b, HV, V, C, BV, SIGN, EVEN)  # [C, BV]
        if states is not None:
            store_state(states, S, index, 0, b, K, V, BK, BV)
        bo = dot(bq, S, None, DT, PREC)  # [C, BV]
        if GATED:
            logs, pre, suf, kept = head_decays(gs, gamma, constant, index, token, rows, seq, head, H, HGS, C, SIGN, EXACT)
            if gs is not None:
                D = decay_matrix(gs, logs, constant, ADJOINT, C, EXACT)
            S *= kept
        A = dot(bq, tl.trans(bk.to(DT)), None, DT, PREC) * D  # [C, C]
        if ADJOINT:  # the state holds scale times what it sums, since its beginning does
            if GATED:
                bo *= suf[:, None]
                passed = bv.to(tl.float32) * (pre * scale)[:, None]
            else:
                passed = bv.to(tl.float32) * scale
            bo = dot(A * scale, bv, bo, DT, PREC)
        else:
            if GATED:
                bo *= pre[:, None]
                passed = bv.to(tl.float32) * suf[:, None]
            else:
                passed = bv
            bo = dot(A, bv, bo, DT, PREC) * scale
        store_rows(o, bo, token, rows, head, b, H, V, C, BV, SIGN, EVEN)
        S = dot(tl.trans(bk.to(DT)), passed, S, DT, PREC)
    if final is not None:
        if ends_sequence(segment, ADJOINT):
            store_state(final, S, seq.to(tl.int64) * H + head, 0, b, K, V, BK, BV)


@triton.jit
def head_gate_rows(
    q, k, gs, gamma, chunks, scale, T, NT,
    A, qd, q_decay, kd, chunk_decay,
    H: tl.constexpr, HK: tl.constexpr, HGS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
    SIGN: tl.constexpr, EVEN: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Programs: chunks * heads. What `gated_rows` leaves of a gate per key channel, of a head's own decay or of none.

    Instead of qd, q times its decays, q_decay may be asked for: those decays alone, [chunks, H, C], and the scale.
    """
    _, head, s = program_at(1, H)
    token, rows, seq = chunk_at(chunks, s, T, NT, C, SIGN)
    if rows <= 0:
        return
    index = s.to(tl.int64) * H + head
    r = tl.arange(0, C)
    constant = constant_decay(gamma, seq, head, H)
    logs, pre, suf, kept = head_decays(gs, gamma, constant, index, token, rows, seq, head, H, HGS, C, SIGN, EXACT)
    scores = tl.zeros([C, C], tl.float32)
    for col in range(0, KP, BK):
        bq = load_rows(q, token, rows, head, col, H, K, C, BK, SIGN, EVEN)  # [C, BK]
        bk = load_rows(k, token, rows, head // (H // HK), col, HK, K, C, BK, SIGN, EVEN)  # [C, BK]
        scores = dot(bq, tl.trans(bk.to(DT)), scores, DT, PREC)
        i = col + tl.arange(0, BK)
        at = index * (C * KP) + (r[:, None] * KP + i[None, :])
        if qd is not None:
            tl.store(qd + at, (bq.to(tl.float32) * (pre * scale)[:, None]).to(DT))
        tl.store(kd + at, (bk.to(tl.float32) * suf[:, None]).to(DT))
        tl.store(chunk_decay + index * KP + i, tl.zeros([BK], tl.float32) + kept)
    if q_decay is not None:
        tl.store(q_decay + index * C + r, pre * scale)
    scores *= decay_matrix(gs, logs, constant, False, C, EXACT)
    tl.store(A + index * (C * C) + (r[:, None] * C + r[None, :]), (scores * scale).to(DT))


@triton.jit
def head_gate_outputs(
    q, k, v, gs, gamma, starts, chunks, scale, T, NT,
    o,
    H: tl.constexpr, HK: tl.constexpr, HGS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, SIGN: tl.constexpr, EVEN: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Programs: value tiles * chunks * heads. starts [chunks, H, K, V]: S before every chunk."""
    TV: tl.constexpr = (V + BV - 1) // BV
    tile, head, s = program_at(TV, H)
    b = tile * BV
    token, rows, seq = chunk_at(chunks, s, T, NT, C, SIGN)
    if rows <= 0:
        return
    index = s.to(tl.int64) * H + head
    A = tl.zeros([C, C], tl.float32)
    bo = tl.zeros([C, BV], tl.float32)
    for c in range(0, K, BK):
        bq = load_rows(q, token, rows, head, c, H, K, C, BK, SIGN, EVEN)  # [C, BK]
        bk = load_rows(k, token, rows, head // (H // HK), c, HK, K, C, BK, SIGN, EVEN)  # [C, BK]
        S = load_state(starts, index, c, b, K, V, V, 1, BK, BV)  # [BK, BV]
        A = dot(bq, tl.trans(bk.to(DT)), A, DT, PREC)
        bo = dot(bq, S, bo, DT, PREC)
    bv = load_rows(v, token, rows, head // (H // HK), b, HK, V, C, BV, SIGN, EVEN)  # [C, BV]
    t = tl.arange(0, C)[:, None]
    u = tl.arange(0, C)[None, :]
    if (gs is not None) or (gamma is not None):
        constant = constant_decay(gamma, seq, head, H)
        logs, pre, _, _ = head_decays(gs, gamma, constant, index, token, rows, seq, head, H, HGS, C, SIGN, EXACT)
        A *= decay_matrix(gs, logs, constant, False, C, EXACT)
        bo *= pre[:, None]
    else:
        A = tl.where(t >= u, A, 0.0)
    store_rows(o, dot(A, bv, bo, DT, PREC) * scale, token, rows, head, b, H, V, C, BV, SIGN, EVEN)


@triton.jit
def _scores(
    q, k, token, rows, head, kv, H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    SIGN: tl.constexpr, EVEN: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """[C, C]: q k^T of a chunk."""
    A = tl.zeros([C, C], tl.float32)
    for c in range(0, K, BK):
        bq = load_rows(q, token, rows, head, c, H, K, C, BK, SIGN, EVEN)
        bk = load_rows(k, token, rows, kv, c, HK, K, C, BK, SIGN, EVEN)
        A = dot(bq, tl.trans(bk.to(DT)), A, DT, PREC)
    return A


@triton.jit
def sum_before(a_before, a, b_before, b):
    """Joins (the sum of all but the last element, the last element) of two neighbours: a scan of it leaves a row's own out."""
    return a_before + a + b_before, b


@triton.jit
def head_gate_backward(
    q, k, v, gs, gamma, do, starts, ends, chunks, scale, T, NT,
    dq, dk, dv, dg,
    H: tl.constexpr, HK: tl.constexpr, HGS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, SIGN: tl.constexpr, EVEN: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Programs: chunks * heads. dq, dk [tokens, H, K], dv [tokens, H, V] or None; dg [tokens, H] (None without a gate)."""
    GATED: tl.constexpr = (gs is not None) or (gamma is not None)
    _, head, s = program_at(1, H)
    kv = head // (H // HK)
    token, rows, seq = chunk_at(chunks, s, T, NT, C, SIGN)
    if rows <= 0:
        return
    index = s.to(tl.int64) * H + head
    t = tl.arange(0, C)[:, None]
    u = tl.arange(0, C)[None, :]
    dA = tl.zeros([C, C], tl.float32)  # do v^T, the adjoint of q k^T * D
    for c in range(0, V, BV):
        bd = load_rows(do, token, rows, head, c, H, V, C, BV, SIGN, EVEN)
        bv = load_rows(v, token, rows, kv, c, HK, V, C, BV, SIGN, EVEN)
        dA = dot(bd, tl.trans(bv.to(DT)), dA, DT, PREC)
    if GATED:
        constant = constant_decay(gamma, seq, head, H)
        logs, pre, suf, kept = head_decays(gs, gamma, constant, index, token, rows, seq, head, H, HGS, C, SIGN, EXACT)
        D = decay_matrix(gs, logs, constant, False, C, EXACT) * scale
        pre *= scale
        if gs is not None:
            if not EXACT:
                passes = not_reset(gs, index, C)
    else:
        D = tl.where(t >= u, scale, 0.0)
    dA *= D
    if GATED and EXACT:
        A = _scores(q, k, token, rows, head, kv, H, HK, K, C, BK, SIGN, EVEN, DT, PREC)
        # The decay of row r is a factor of every score with s < r <= t: added up for each r, over t >= r and then over s < r.
        spanned = dot(onwards(C), tl.where(t > u, A * dA, 0.0), None, DT, PREC)
        of_scores = tl.sum(tl.where(u < t, spanned, 0.0), 1)  # [C]
    # A row's score with itself has no decay. Apart from the others it cannot drown them where all decays are strong.
    itself = tl.sum(tl.where(t == u, dA, 0.0), 1)  # [C]
    dA = tl.where(t > u, dA, 0.0).to(DT)
    dAt = tl.trans(dA)
    balance = tl.zeros([C], tl.float32)
    at_suffix = tl.zeros([C], tl.float32)
    through = 0.0
    for a in range(0, K, BK):
        bq = load_rows(q, token, rows, head, a, H, K, C, BK, SIGN, EVEN)  # [C, BK]
        bk = load_rows(k, token, rows, kv, a, HK, K, C, BK, SIGN, EVEN)
        xq = tl.zeros([C, BK], tl.float32)
        xk = tl.zeros([C, BK], tl.float32)
        for c in range(0, V, BV):
            bd = load_rows(do, token, rows, head, c, H, V, C, BV, SIGN, EVEN)  # [C, BV]
            bv = load_rows(v, token, rows, kv, c, HK, V, C, BV, SIGN, EVEN)
            S = load_state(starts, index, a, c, K, V, V, 1, BK, BV)  # [BK, BV]
            dS = load_state(ends, index, a, c, K, V, V, 1, BK, BV)
            xq = dot(bd, tl.trans(S.to(DT)), xq, DT, PREC)
            xk = dot(bv, tl.trans(dS.to(DT)), xk, DT, PREC)
            if GATED:
                through += tl.sum(tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1), 0)
        fq = bq.to(tl.float32)
        fk = bk.to(tl.float32)
        # One after the other, dq stored before dk is begun: so three programs of 64 channels fit without spills.
        if GATED:
            xq *= pre[:, None]
        else:
            xq *= scale
        if GATED and EXACT:
            balance += tl.sum(xq * fq, 1)
        xq = dot(dA, bk, xq, DT, PREC)
        if GATED and not EXACT:
            balance += tl.sum(xq * fq, 1)
        store_rows(dq, xq + itself[:, None] * fk, token, rows, head, a, H, K, C, BK, SIGN, EVEN)
        if GATED:
            xk *= suf[:, None]
            at_suffix += tl.sum(xk * fk, 1)
        yk = dot(dAt, bq, None, DT, PREC)
        if GATED and not EXACT:
            balance -= tl.sum(yk * fk, 1)
        store_rows(dk, xk + yk + itself[:, None] * fq, token, rows, head, a, H, K, C, BK, SIGN, EVEN)
    if dv is not None:
        A = _scores(q, k, token, rows, head, kv, H, HK, K, C, BK, SIGN, EVEN, DT, PREC)
        At = tl.trans((A * D).to(DT))
        for c in range(0, V, BV):
            xv = tl.zeros([C, BV], tl.float32)
            for a in range(0, K, BK):
                bk = load_rows(k, token, rows, kv, a, HK, K, C, BK, SIGN, EVEN)  # [C, BK]
                dS = load_state(ends, index, a, c, K, V, V, 1, BK, BV)  # [BK, BV]
                xv = dot(bk, dS, xv, DT, PREC)
            if GATED:
                xv *= suf[:, None]
            bd = load_rows(do, token, rows, head, c, H, V, C, BV, SIGN, EVEN)
            store_rows(dv, dot(At, bd, xv, DT, PREC), token, rows, head, c, H, V, C, BV, SIGN, EVEN)
    if GATED:
        # The decay of row r is in what every row t >= r reads, of the state and of rows s < r, in what the state keeps of every
        # row before r, and in what passes through the whole chunk. Where a score (t, s) is not counted by itself (EXACT) it
        # counts at t and, negative, at s, by the very same products: of scores from r on only rounding is left in the sum.
        kept_before, _ = tl.associative_scan((tl.zeros([C], tl.float32), at_suffix), 0, sum_before)
        dlog = tl.cumsum(balance, 0, reverse=True) + kept_before + through * kept
        if EXACT:
            dlog += of_scores
        elif gs is not None:
            dlog = tl.where(passes, dlog, 0.0)
        r = tl.arange(0, C)
        tl.store(dg + (token + SIGN * r) * H + head, dlog, mask=r < rows)
