"""The state of the delta rule from chunk to chunk, forward and back in time.

    forward:  R = v - kP S;           E = R - Z (beta R);     U = beta E;    o = qP S + N U;    S' = D S + ks^T U
    adjoint:  R = N^T do + ks dS;    dU = R - Z^T (beta R);  dv = beta dU;                     dS' = D dS + qP^T do - kP^T dv

qP, kP: query (scaled) and key times the decays up to and with their row; ks: key times the decays after it; N[t, s]: the scores
qP_t . k_s with the decay from s to t, for s <= t; D: the chunk's decay; Z: of `delta_correction`. With a gate per key channel
(ROWS) these were made before, chunk by chunk. With one per head or none they are made here, of rows as they came: the decays are
factors of whole rows then, and multiply what comes out of a product.

A program holds all key channels of a state for BV value channels, and scans one sequence.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ejkernel.kernels._triton.gated_delta_rule.kernels.correction import load_per_head
from ejkernel.kernels._triton.linear.kernels.head_decays import decay_matrix, head_decays
from ejkernel.kernels._triton.linear.kernels.segments import chunk_in_turn, rows_of_segment, scanned_segment, state_at_start
from ejkernel.kernels._triton.linear.kernels.tiles import dot, load_rows, program_at, store_rows, store_state


@triton.jit
def _load_prepared(x, index, C: tl.constexpr, D: tl.constexpr):
    """[C, D]: what was made of a chunk's rows before."""
    return tl.load(x + index * (C * D) + (tl.arange(0, C)[:, None] * D + tl.arange(0, D)[None, :]))


@triton.jit
def _lower(C: tl.constexpr):
    """[C, C]: 1 where column <= row, in float32."""
    r = tl.arange(0, C)
    return tl.where(r[None, :] <= r[:, None], 1.0, 0.0)


@triton.jit
def delta_scan(
    q, k, ks, N, chunk_decay, v, beta, gs, Z, begin, chunks, segments, scale, T, NT, NS, SC,
    o, final, states, errors,
    H: tl.constexpr, HK: tl.constexpr, HGS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, SIGN: tl.constexpr, EVEN: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr, EXACT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Programs: value tiles * sequences * heads; BK >= K.

    With ks, N and chunk_decay given, q, k and ks are prepared rows [chunks, H, C, BK], N [chunks, H, C, C] and chunk_decay
    [chunks, H, BK]. states [chunks, H, K, V] (S before every chunk) and errors [tokens, H, V] (E) are kept if given.
    """
    ROWS: tl.constexpr = ks is not None
    TV: tl.constexpr = (V + BV - 1) // BV
    tile, head, unit = program_at(TV, H)
    b = tile * BV
    segment, idle = scanned_segment(segments, unit, NT, NS, SC, False, False)
    if idle:
        return
    _g, first, count, seq, _place, _total = segment
    S = state_at_start(begin, None, None, None, segment, head, 0, b, False, H, K, V, V, 1, BK, BV, 0)  # [BK, BV]
    token0, rows_left = rows_of_segment(chunks, first, count, T, NT, C, SIGN)
    for n in tl.range(count, num_stages=STAGES):
        s, token, rows = chunk_in_turn(first, count, token0, rows_left, n, False, C, SIGN)
        index = s.to(tl.int64) * H + head
        if ROWS:
            bq = _load_prepared(q, index, C, BK)  # [C, BK]
            bk = _load_prepared(k, index, C, BK)
            bs = _load_prepared(ks, index, C, BK)
            scores = _load_prepared(N, index, C, C)
            kept = tl.load(chunk_decay + index * BK + tl.arange(0, BK))[:, None]
        else:
            bq = load_rows(q, token, rows, head // (H // HK), 0, HK, K, C, BK, SIGN, EVEN)  # [C, BK]
            bk = load_rows(k, token, rows, head // (H // HK), 0, HK, K, C, BK, SIGN, EVEN)
            bs = bk
        bv = load_rows(v, token, rows, head, b, H, V, C, BV, SIGN, EVEN)  # [C, BV]
        bz = _load_prepared(Z, index, C, C)
        bb = load_per_head(beta, token, rows, head, H, C, SIGN)
        if states is not None:
            store_state(states, S, index, 0, b, K, V, BK, BV)
        Sd = S.to(DT)
        bo = dot(bq, Sd, None, DT, PREC)  # [C, BV]
        predicted = dot(bk, Sd, None, DT, PREC)
        if not ROWS:
            scores = dot(bq, tl.trans(bk.to(DT)), None, DT, PREC) * scale  # [C, C]
            bo *= scale
            kept = 1.0
            if gs is not None:
                logs, pre, suf, kept = head_decays(gs, None, 0.0, index, token, rows, seq, head, H, HGS, C, SIGN, EXACT)
                scores *= decay_matrix(gs, logs, 0.0, False, C, EXACT)
                predicted *= pre[:, None]
                bo *= pre[:, None]
            else:
                scores *= _lower(C)
        R = bv.to(tl.float32) - predicted
        E = R - dot(bz, R * bb[:, None], None, DT, PREC)
        if errors is not None:
            store_rows(errors, E, token, rows, head, b, H, V, C, BV, SIGN, EVEN)
        U = E * bb[:, None]
        bo = dot(scores, U, bo, DT, PREC)
        store_rows(o, bo, token, rows, head, b, H, V, C, BV, SIGN, EVEN)
        if not ROWS:
            if gs is not None:
                U *= suf[:, None]
        S = dot(tl.trans(bs.to(DT)), U, S * kept, DT, PREC)
    store_state(final, S, seq.to(tl.int64) * H + head, 0, b, K, V, BK, BV)


@triton.jit
def delta_adjoint_scan(
    q, k, ks, N, chunk_decay, do, beta, gs, Z, errors, begin, chunks, segments, scale, T, NT, NS, SC,
    dv, dbeta, final, states,
    H: tl.constexpr, HK: tl.constexpr, HGS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, SIGN: tl.constexpr, EVEN: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr, EXACT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Programs: value tiles * sequences * heads, back in time. begin: the final state's adjoint; final: the initial state's.

    dv [tokens, H, V]; dbeta [tokens, H, value tiles], whose sum over the tiles is the gradient; states [chunks, H, K, V]: dS
    after every chunk. All else as in `delta_scan`.
    """
    ROWS: tl.constexpr = ks is not None
    TV: tl.constexpr = (V + BV - 1) // BV
    tile, head, unit = program_at(TV, H)
    b = tile * BV
    segment, idle = scanned_segment(segments, unit, NT, NS, SC, True, False)
    if idle:
        return
    _g, first, count, seq, _place, _total = segment
    S = state_at_start(begin, None, None, None, segment, head, 0, b, True, H, K, V, V, 1, BK, BV, 0)  # [BK, BV]
    token0, rows_left = rows_of_segment(chunks, first, count, T, NT, C, SIGN)
    r = tl.arange(0, C)
    for n in tl.range(count, num_stages=STAGES):
        s, token, rows = chunk_in_turn(first, count, token0, rows_left, n, True, C, SIGN)
        index = s.to(tl.int64) * H + head
        if ROWS:
            bq = _load_prepared(q, index, C, BK)  # [C, BK]
            bk = _load_prepared(k, index, C, BK)
            bs = _load_prepared(ks, index, C, BK)
            scores = tl.trans(_load_prepared(N, index, C, C))
            kept = tl.load(chunk_decay + index * BK + tl.arange(0, BK))[:, None]
        else:
            bq = load_rows(q, token, rows, head // (H // HK), 0, HK, K, C, BK, SIGN, EVEN)  # [C, BK]
            bk = load_rows(k, token, rows, head // (H // HK), 0, HK, K, C, BK, SIGN, EVEN)
            bs = bk
        bd = load_rows(do, token, rows, head, b, H, V, C, BV, SIGN, EVEN)  # [C, BV]
        be = load_rows(errors, token, rows, head, b, H, V, C, BV, SIGN, EVEN)
        bz = _load_prepared(Z, index, C, C)
        bb = load_per_head(beta, token, rows, head, H, C, SIGN)
        store_state(states, S, index, 0, b, K, V, BK, BV)
        R = dot(bs, S, None, DT, PREC)  # [C, BV]
        read = bd
        if not ROWS:
            scores = dot(bk, tl.trans(bq.to(DT)), None, DT, PREC) * scale  # [C, C], transposed
            kept = 1.0
            read = bd.to(tl.float32) * scale
            if gs is not None:
                logs, pre, suf, kept = head_decays(gs, None, 0.0, index, token, rows, seq, head, H, HGS, C, SIGN, EXACT)
                scores *= decay_matrix(gs, logs, 0.0, True, C, EXACT)
                R *= suf[:, None]
                read *= pre[:, None]
            else:
                scores *= tl.trans(_lower(C))
        R = dot(scores, bd, R, DT, PREC)
        dU = R - dot(tl.trans(bz), R * bb[:, None], None, DT, PREC)
        at = ((token + SIGN * r) * H + head) * TV + tile
        tl.store(dbeta + at, tl.sum(dU * be.to(tl.float32), 1), mask=r < rows)
        dR = dU * bb[:, None]
        store_rows(dv, dR, token, rows, head, b, H, V, C, BV, SIGN, EVEN)
        if not ROWS:
            if gs is not None:
                dR *= pre[:, None]
        S = dot(tl.trans(bq.to(DT)), read, S * kept, DT, PREC)
        S = dot(tl.trans(bk.to(DT)), -dR, S, DT, PREC)
    store_state(final, S, seq.to(tl.int64) * H + head, 0, b, K, V, BK, BV)
