"""The state of the delta rule from chunk to chunk, forward and back in time.

    forward:  R = v - kP S;           E = R - Z (beta R);     U = beta E;    o = qP S + N U;    S' = D S + ks^T U
    adjoint:  R = N^T do + ks dS;    dU = R - Z^T (beta R);  dv = beta dU;                     dS' = D dS + qP^T do - kP^T dv

qP, kP: query (scaled) and key times the decays up to and with their row; ks: key times the decays after it; N[t, s]: the scores
qP_t . k_s with the decay from s to t, for s <= t; D: the chunk's decay; Z: of `delta_correction`. With a gate per key channel
(ROWS) the rows were made before, chunk by chunk. With one per head or none they are read as they came: the decays are factors
of whole rows then, and multiply what comes out of a product.

A program holds all key channels of a state for BV value channels, and scans one sequence, or one segment of it (then from the
state that `segment_ends` found). Everything that it computes is transposed, [value channels, rows or key channels]: so each
result is the left operand of the next product, which the tensor cores take from registers, and shared memory holds nothing but
rows of the chunks to come.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ejkernel.kernels._triton.gated_delta_rule.kernels.correction import load_key_scores, load_lower
from ejkernel.kernels._triton.linear.kernels.head_decays import head_decays
from ejkernel.kernels._triton.linear.kernels.segments import (
    chunk_in_turn,
    ends_sequence,
    rows_of_segment,
    scanned_segment,
    starts_sequence,
)
from ejkernel.kernels._triton.linear.kernels.tiles import dot, load_rows, load_state, program_at, store_rows, store_state


@triton.jit
def load_prepared(x, index, C: tl.constexpr, D: tl.constexpr):
    """[C, D]: what was made of a chunk's rows before."""
    return tl.load(x + index * (C * D) + (tl.arange(0, C)[:, None] * D + tl.arange(0, D)[None, :]))


@triton.jit
def refined(E, R, bb, Z, M, DT: tl.constexpr, PREC: tl.constexpr):
    """E of E = R - (beta E) M, M in float64, made better once: Z alone loses digits where keys are alike and beta is near 2.

    What E leaves of R is a small difference of large sums there, so it is taken in float64. In float32 its own rounding costs 5
    to 8 times what a step-by-step form loses.
    """
    written = E.to(tl.float64) * bb.to(tl.float64)
    left = (R.to(tl.float64) - E.to(tl.float64) - tl.dot(written, M, out_dtype=tl.float64)).to(tl.float32)
    return E + (left - dot(left * bb, Z, None, DT, PREC))


@triton.jit
def _load_rows(
    q, k, ks, token, rows, index, head, H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    SIGN: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """A chunk's qP, kP and ks, each [C, BK], or q, k and k as they came."""
    if ks is not None:
        bq = load_prepared(q, index, C, BK)
        bk = load_prepared(k, index, C, BK)
        bs = load_prepared(ks, index, C, BK)
    else:
        bq = load_rows(q, token, rows, head // (H // HK), 0, HK, K, C, BK, SIGN, EVEN)
        bk = load_rows(k, token, rows, head // (H // HK), 0, HK, K, C, BK, SIGN, EVEN)
        bs = bk
    return bq, bk, bs


@triton.jit
def _state_at_start(
    begin, starts, segment, head, b, ADJOINT: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """[BV, BK]: the state before a segment, transposed: of `begin` before a sequence's first one, of `starts` before others."""
    S = tl.zeros([BV, BK], tl.float32)
    if begin is not None:
        S += load_state(begin, segment[3].to(tl.int64) * H + head, b, 0, V, K, 1, V, BV, BK).to(tl.float32)
    if starts is not None:
        if not starts_sequence(segment, ADJOINT):
            S = load_state(starts, segment[0].to(tl.int64) * H + head, b, 0, V, K, 1, V, BV, BK)
    return S


@triton.jit
def delta_scan(
    q, k, ks, N, M, chunk_decay, v, betas, gs, Z, begin, starts, chunks, segments, scale, T, NT, NS, SC,
    o, final, states, errors,
    H: tl.constexpr, HK: tl.constexpr, HGS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, SIGN: tl.constexpr, EVEN: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr, EXACT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Programs: value tiles * segments * heads; BK >= K. N, Z [chunks, H, C, C]. begin [N, H, K, V]: the state before each
    sequence, 0 where None; starts [segments, H, K, V]: of `delta_segment_starts`, where sequences may have several.

    betas [chunks, H, C]: of `delta_correction`. M [chunks, H, 2, C, C], 0 for s >= t: the scores of keys with keys, high and
    low part, by which E is refined once where float32's digits are asked for: Z alone would lose some where keys are alike and
    beta is near 2. Else None.

    With ks and chunk_decay given, q, k and ks are prepared rows [chunks, H, C, BK], q scaled, and chunk_decay [chunks, H, BK].
    states [chunks, H, K, V] (S before every chunk) and errors [tokens, H, V] (E) are kept if given.
    """
    ROWS: tl.constexpr = ks is not None
    TV: tl.constexpr = (V + BV - 1) // BV
    tile, head, unit = program_at(TV, H)
    b = tile * BV
    segment, idle = scanned_segment(segments, unit, NT, NS, SC, False, False)
    if idle:
        return
    _g, first, count, seq, _place, _total = segment
    S = _state_at_start(begin, starts, segment, head, b, False, H, K, V, BK, BV)
    token0, rows_left = rows_of_segment(chunks, first, count, T, NT, C, SIGN)
    for n in tl.range(count, num_stages=STAGES):
        s, token, rows = chunk_in_turn(first, count, token0, rows_left, n, False, C, SIGN)
        index = s.to(tl.int64) * H + head
        bq, bk, bs = _load_rows(q, k, ks, token, rows, index, head, H, HK, K, C, BK, SIGN, EVEN)
        bv = load_rows(v, token, rows, head, b, H, V, C, BV, SIGN, EVEN)  # [C, BV]
        bz = load_lower(Z, index, C)
        bn = load_lower(N, index, C)
        bb = tl.load(betas + index * C + tl.arange(0, C))[None, :]
        Sd = S.to(DT)
        if states is not None:
            store_state(states, tl.trans(Sd), index, 0, b, K, V, BK, BV)
        R = dot(Sd, tl.trans(bk.to(DT)), None, DT, PREC)  # [BV, C]
        bo = dot(Sd, tl.trans(bq.to(DT)), None, DT, PREC)
        if ROWS:
            S *= tl.load(chunk_decay + index * BK + tl.arange(0, BK))[None, :]
        else:
            if gs is not None:
                _logs, pre, suf, kept = head_decays(gs, None, 0.0, index, token, rows, seq, head, H, HGS, C, SIGN, EXACT)
                S *= kept
                R *= pre[None, :]
                bo *= pre[None, :]
            bo *= scale
        R = tl.trans(bv).to(tl.float32) - R
        E = R - dot(R * bb, tl.trans(bz), None, DT, PREC)
        if M is not None:
            E = refined(E, R, bb, tl.trans(bz), tl.trans(load_key_scores(M, index, C)), DT, PREC)
        U = E * bb
        bo = dot(U, tl.trans(bn), bo, DT, PREC)
        if not ROWS:
            if gs is not None:
                U *= suf[None, :]
        S = dot(U, bs, S, DT, PREC)
        store_rows(o, tl.trans(bo), token, rows, head, b, H, V, C, BV, SIGN, EVEN)
        if errors is not None:
            store_rows(errors, tl.trans(E), token, rows, head, b, H, V, C, BV, SIGN, EVEN)
    if ends_sequence(segment, False):
        store_state(final, tl.trans(S), seq.to(tl.int64) * H + head, 0, b, K, V, BK, BV)


@triton.jit
def delta_adjoint_scan(
    q, k, ks, N, M, chunk_decay, do, betas, gs, Z, errors, begin, starts, chunks, segments, scale, T, NT, NS, SC,
    dv, dbeta, final, states,
    H: tl.constexpr, HK: tl.constexpr, HGS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, SIGN: tl.constexpr, EVEN: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr, EXACT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Programs: value tiles * segments * heads, back in time. begin: the final state's adjoint; final: the initial state's.

    dv [tokens, H, V]; dbeta [tokens, H, value tiles], whose sum over the tiles is the gradient; states [chunks, H, K, V]: dS
    after every chunk. Where those are None, begin and starts too, only the segments' ends are made: final [segments, H, K, V].
    All else as in `delta_scan`.
    """
    ENDS_ONLY: tl.constexpr = dv is None
    ROWS: tl.constexpr = ks is not None
    TV: tl.constexpr = (V + BV - 1) // BV
    tile, head, unit = program_at(TV, H)
    b = tile * BV
    segment, idle = scanned_segment(segments, unit, NT, NS, SC, True, ENDS_ONLY)
    if idle:
        return
    g, first, count, seq, _place, _total = segment
    S = _state_at_start(begin, starts, segment, head, b, True, H, K, V, BK, BV)
    token0, rows_left = rows_of_segment(chunks, first, count, T, NT, C, SIGN)
    r = tl.arange(0, C)
    for n in tl.range(count, num_stages=STAGES):
        s, token, rows = chunk_in_turn(first, count, token0, rows_left, n, True, C, SIGN)
        index = s.to(tl.int64) * H + head
        bq, bk, bs = _load_rows(q, k, ks, token, rows, index, head, H, HK, K, C, BK, SIGN, EVEN)
        bd = tl.trans(load_rows(do, token, rows, head, b, H, V, C, BV, SIGN, EVEN))  # [BV, C]
        if not ENDS_ONLY:
            be = tl.trans(load_rows(errors, token, rows, head, b, H, V, C, BV, SIGN, EVEN))
        bz = load_lower(Z, index, C)
        bn = load_lower(N, index, C)
        bb = tl.load(betas + index * C + tl.arange(0, C))[None, :]
        Sd = S.to(DT)
        if not ENDS_ONLY:
            store_state(states, tl.trans(Sd), index, 0, b, K, V, BK, BV)
        R = dot(Sd, tl.trans(bs.to(DT)), None, DT, PREC)  # [BV, C]
        read = bd
        if ROWS:
            S *= tl.load(chunk_decay + index * BK + tl.arange(0, BK))[None, :]
        else:
            read = bd.to(tl.float32) * scale
            if gs is not None:
                _logs, pre, suf, kept = head_decays(gs, None, 0.0, index, token, rows, seq, head, H, HGS, C, SIGN, EXACT)
                S *= kept
                R *= suf[None, :]
                read *= pre[None, :]
        R = dot(bd, bn, R, DT, PREC)
        S = dot(read, bq, S, DT, PREC)
        dU = R - dot(R * bb, bz, None, DT, PREC)
        if M is not None:
            dU = refined(dU, R, bb, bz, load_key_scores(M, index, C), DT, PREC)
        dR = dU * bb
        negative = -dR
        if not ROWS:
            if gs is not None:
                negative *= pre[None, :]
        S = dot(negative, bk, S, DT, PREC)
        if not ENDS_ONLY:
            store_rows(dv, tl.trans(dR), token, rows, head, b, H, V, C, BV, SIGN, EVEN)
            at = ((token + SIGN * r) * H + head) * TV + tile
            tl.store(dbeta + at, tl.sum(dU * be.to(tl.float32), 0), mask=r < rows)
    if ENDS_ONLY:
        store_state(final, tl.trans(S), g.to(tl.int64) * H + head, 0, b, K, V, BK, BV)
    elif ends_sequence(segment, True):
        store_state(final, tl.trans(S), seq.to(tl.int64) * H + head, 0, b, K, V, BK, BV)
