"""The delta rule over several segments of a sequence at a time, for calls with too few sequences and heads to fill a device.

What a segment makes of the state before it is an affine map, S' = M S + U: its transition M [K, K] is a product of all its
rows' (I - beta k k^T) and decays. Both are ends of one recurrence, U with the segment's values from a state of zero, M without
values from the identity. A first launch scans every segment for them, the second combines them into the state that each
segment starts from; then all segments are scanned at once. Adjoints go back in time with M^T.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ejkernel.kernels._triton.gated_delta_rule.kernels.correction import load_key_scores, load_lower
from ejkernel.kernels._triton.gated_delta_rule.kernels.scans import load_prepared, refined
from ejkernel.kernels._triton.linear.kernels.head_decays import head_decays
from ejkernel.kernels._triton.linear.kernels.segments import chunk_in_turn, ends_sequence, rows_of_segment, scanned_segment
from ejkernel.kernels._triton.linear.kernels.tiles import dot, load_rows, load_state, program_at, store_state


@triton.jit
def delta_segment_ends(
    k, ks, M, chunk_decay, v, betas, gs, Z, chunks, segments, T, NT, NS, SC,
    ends, transitions,
    H: tl.constexpr, HK: tl.constexpr, HGS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, SIGN: tl.constexpr, EVEN: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr, EXACT: tl.constexpr,
    STAGES: tl.constexpr, LAST: tl.constexpr,
):  # fmt: skip
    """Programs: tiles of value channels, then of key channels * segments * heads; all else as in `delta_scan`.

    ends [segments, H, K, V]: U; transitions [segments, H, K, K]: M; of all segments but those that end a sequence, of which
    LAST asks for the transition, too, where it has others: adjoints need it.
    """
    ROWS: tl.constexpr = ks is not None
    TV: tl.constexpr = (V + BV - 1) // BV
    tile, head, unit = program_at(TV + (K + BV - 1) // BV, H)
    segment, idle = scanned_segment(segments, unit, NT, NS, SC, False, False)
    of_values = tile < TV
    g, first, count, seq, _place, total = segment
    unread = ends_sequence(segment, False)
    if LAST:
        unread = unread & (of_values | (total == 1))
    if idle | unread:
        return
    b = tile * BV
    row = tile * BV - TV * BV  # of the identity
    same = row + tl.arange(0, BV)[:, None] == tl.arange(0, BK)[None, :]
    S = tl.where(same & (tile >= TV), 1.0, 0.0)  # [BV, BK]: transposed, as everything here
    token0, rows_left = rows_of_segment(chunks, first, count, T, NT, C, SIGN)
    for n in tl.range(count, num_stages=STAGES):
        s, token, rows = chunk_in_turn(first, count, token0, rows_left, n, False, C, SIGN)
        index = s.to(tl.int64) * H + head
        if ROWS:
            bk = load_prepared(k, index, C, BK)
            bs = load_prepared(ks, index, C, BK)
        else:
            bk = load_rows(k, token, rows, head // (H // HK), 0, HK, K, C, BK, SIGN, EVEN)
            bs = bk
        bv = load_rows(v, token, tl.where(of_values, rows, 0), head, b, H, V, C, BV, SIGN, False)  # [C, BV]
        bz = load_lower(Z, index, C)
        bb = tl.load(betas + index * C + tl.arange(0, C))[None, :]
        R = dot(S, tl.trans(bk.to(DT)), None, DT, PREC)  # [BV, C]
        if ROWS:
            S *= tl.load(chunk_decay + index * BK + tl.arange(0, BK))[None, :]
        elif gs is not None:
            _logs, pre, suf, kept = head_decays(gs, None, 0.0, index, token, rows, seq, head, H, HGS, C, SIGN, EXACT)
            S *= kept
            R *= pre[None, :]
        R = tl.trans(bv).to(tl.float32) - R
        E = R - dot(R * bb, tl.trans(bz), None, DT, PREC)
        if M is not None:
            E = refined(E, R, bb, tl.trans(bz), tl.trans(load_key_scores(M, index, C)), DT, PREC)
        U = E * bb
        if not ROWS:
            if gs is not None:
                U *= suf[None, :]
        S = dot(U, bs, S, DT, PREC)
    place = g.to(tl.int64) * H + head
    if of_values:
        store_state(ends, tl.trans(S), place, 0, b, K, V, BK, BV)
    else:
        store_state(transitions, tl.trans(S), place, 0, row, K, K, BK, BV)


@triton.jit
def delta_segment_starts(
    begin, ends, transitions, segments, NT, NS, SC,
    starts,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, ADJOINT: tl.constexpr,
    PREC: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs: value tiles * segments * heads, of which those of a sequence's first segment do the work.

    starts [segments, H, K, V]: the state before every segment but a sequence's first, or, ADJOINT, the adjoint after every one
    but its last. begin [N, H, K, V]: the sequence's own, 0 where None. ends, transitions: of `delta_segment_ends`; ADJOINT:
    ends of `delta_adjoint_scan` from zero.
    """
    tile, head, unit = program_at((V + BV - 1) // BV, H)
    segment, idle = scanned_segment(segments, unit, NT, NS, SC, False, False)
    g, _first, _count, seq, place, total = segment
    if idle | (place > 0) | (total == 1):
        return
    b = tile * BV
    S = tl.zeros([BK, BV], tl.float32)
    if begin is not None:
        S += load_state(begin, seq.to(tl.int64) * H + head, 0, b, K, V, V, 1, BK, BV).to(tl.float32)
    at = g
    step = 1
    if ADJOINT:
        at = g + total - 1
        step = -1
    for _ in tl.range(total - 1, num_stages=STAGES):
        index = at.to(tl.int64) * H + head
        if ADJOINT:
            M = load_state(transitions, index, 0, 0, K, K, 1, K, BK, BK)
        else:
            M = load_state(transitions, index, 0, 0, K, K, K, 1, BK, BK)
        S = tl.dot(M, S.to(M.dtype), load_state(ends, index, 0, b, K, V, V, 1, BK, BV), input_precision=PREC)
        at += step
        store_state(starts, S, at.to(tl.int64) * H + head, 0, b, K, V, BK, BV)
