"""Outputs of weakly gated sequences in one scan from q, k, v and the gates per key channel, bfloat16, chunks of 64 rows.

With c the running sum of a chunk's log decays and m half of its last value, both factors below are in the exponent's range
where the chunk is weakly gated (see `weak_chunks`):

    q' = q exp(c - m),  k' = k exp(m - c),  R = exp(m) S          o = scale (tril(q' k'^T) v + q' R)
                                                                  S' = exp(m) (R + k'^T v)

Nothing but m goes through memory: `find_strong_sequences` makes it, and finds the sequences that must be left to the exact
kernels. Key channels come in parts of BK, each with its part of the state, so that few of them are in registers at a time.
"""

# mypy: disable-error-code="assignment,var-annotated,misc"
# ruff: noqa: RUF005  (Triton knows tuples and their sums, but not iterable unpacking)
from __future__ import annotations

import triton
import triton.language as tl

from ejkernel.kernels._triton.linear.kernels.segments import (
    chunk_in_turn,
    ends_sequence,
    rows_of_segment,
    scanned_segment,
    state_at_start,
)
from ejkernel.kernels._triton.linear.kernels.tiles import (
    channel_log_decay,
    chunk_at,
    dot_split,
    exp_both_ways,
    exp_of_log,
    load_rows,
    program_at,
    put,
    split,
    store_rows,
    store_state,
    sums,
)


@triton.jit
def find_strong_sequences(
    g, gs, gamma, chunks, T, NT,
    middle, strong,
    H: tl.constexpr, HG: tl.constexpr, HGS: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, SIGN: tl.constexpr,
    EVEN: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """Programs: chunks * heads. middle [chunks, H, KP]: m, half of the sum of a chunk's log decays.

    strong [sequences, H], zeros before: 1 where a chunk of the sequence is not weakly gated.
    """
    _, head, s = program_at(1, H)
    token, rows, seq = chunk_at(chunks, s, T, NT, 64, SIGN)
    if rows <= 0:
        return
    logs = channel_log_decay(g, gs, gamma, token, rows, seq, head, 0, True, H, HG, HGS, K, 64, KP, SIGN, EVEN)  # [C, KP]
    tl.store(middle + (s.to(tl.int64) * H + head) * KP + tl.arange(0, KP), tl.sum(logs, 0) * 0.5)
    weak = tl.max(tl.sum(tl.abs(logs), 0), 0) <= LIMIT
    if not weak:
        tl.store(strong + seq * H + head, 1)  # whoever writes it writes the same


@triton.jit
def _from_middle(
    g, gs, gamma, token, rows, seq, head, col, H: tl.constexpr, HG: tl.constexpr, HGS: tl.constexpr, K: tl.constexpr,
    BK: tl.constexpr, SIGN: tl.constexpr, EVEN: tl.constexpr, GATE_PARTS: tl.constexpr,
):  # fmt: skip
    """[C, BK]: c - m, a product with 1/2 for the rows up to each and -1/2 for those after it."""
    C: tl.constexpr = 64
    r = tl.arange(0, C)
    halves = tl.where(r[None, :] <= r[:, None], 0.5, -0.5).to(tl.bfloat16)  # [C, C]
    if gs is None and gamma is None and GATE_PARTS == 1:  # from memory to the tensor cores as it is
        return tl.dot(halves, load_rows(g, token, rows, head // (H // HG), col, HG, K, C, BK, SIGN, EVEN))
    else:
        logs = channel_log_decay(g, gs, gamma, token, rows, seq, head, col, True, H, HG, HGS, K, C, BK, SIGN, EVEN)
        return sums(halves, logs, GATE_PARTS)


@triton.jit
def weak_scan(
    q, k, v, g, gs, gamma, middle, strong, begin, ends, end_decay, chunks, segments, scale, T, NT, NS, SC,
    o, final, segment_decay,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, HG: tl.constexpr, HGS: tl.constexpr,
    K: tl.constexpr, KP: tl.constexpr, BK: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, SIGN: tl.constexpr,
    EVEN: tl.constexpr, GATE_PARTS: tl.constexpr, SCORE_PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs: value tiles * segments * heads. With segment_decay given: only each segment's end (in final) and decay, no q.

    Nothing of the sequences and heads that are `strong`. SCORE_PARTS: products that make the scores, 1 of bfloat16 operands or
    3 of their high and low parts.
    """
    C: tl.constexpr = 64
    DT: tl.constexpr = tl.bfloat16
    PARTS: tl.constexpr = KP // BK
    ENDS_ONLY: tl.constexpr = segment_decay is not None
    TV: tl.constexpr = (V + BV - 1) // BV
    tile, head, unit = program_at(TV, H)
    b = tile * BV
    segment, idle = scanned_segment(segments, unit, NT, NS, SC, False, ENDS_ONLY)
    if idle:
        return
    place, first, count, seq, _place, _total = segment
    if tl.load(strong + seq * H + head) > 0:
        return
    r = tl.arange(0, C)
    ck = tl.arange(0, BK)
    S = ()  # the state's parts [BK, BV], each without its last factor
    last = ()  # that factor, [BK]
    total = ()  # of m, [BK]
    for part in tl.static_range(PARTS):
        S = S + (state_at_start(begin, ends, end_decay, None, segment, head, part * BK, b, False, H, K, V, V, 1, BK, BV, 0),)
        last = last + (tl.full([BK], 1.0, tl.float32),)
        total = total + (tl.zeros([BK], tl.float32),)
    token0, rows_left = rows_of_segment(chunks, first, count, T, NT, C, SIGN)
    for n in tl.range(count, num_stages=STAGES):
        s, token, rows = chunk_in_turn(first, count, token0, rows_left, n, False, C, SIGN)
        index = s.to(tl.int64) * H + head
        bv = load_rows(v, token, rows, head // (H // HV), b, HV, V, C, BV, SIGN, EVEN)  # [C, BV]
        scores = tl.zeros([C, C], tl.float32)
        bo = tl.zeros([C, BV], tl.float32)
        for part in tl.static_range(PARTS):
            col = part * BK
            bk = load_rows(k, token, rows, head // (H // HK), col, HK, K, C, BK, SIGN, EVEN)  # [C, BK]
            c = _from_middle(g, gs, gamma, token, rows, seq, head, col, H, HG, HGS, K, BK, SIGN, EVEN, GATE_PARTS)
            m = tl.load(middle + index * KP + col + ck)  # [BK]
            half = exp_of_log(m)
            R = S[part] * (last[part] * half)[:, None]  # [BK, BV]
            if ENDS_ONLY:
                k0 = (bk.to(tl.float32) * exp_of_log(-c)).to(DT)
                total = put(total, part, total[part] + m)
            else:
                bq = load_rows(q, token, rows, head // (H // HQ), col, HQ, K, C, BK, SIGN, EVEN)  # [C, BK]
                to_row, from_row = exp_both_ways(c)
                q0, q1 = split(bq.to(tl.float32) * to_row)
                k0, k1 = split(bk.to(tl.float32) * from_row)
                bo = tl.dot(q0, R.to(DT), bo)
                if SCORE_PARTS == 3:
                    scores = dot_split(q0, q1, tl.trans(k0), tl.trans(k1), scores)
                else:
                    scores = tl.dot(q0, tl.trans(k0), scores)
            S = put(S, part, tl.dot(tl.trans(k0), bv, R))
            last = put(last, part, half)
        if not ENDS_ONLY:
            scores = tl.where(r[:, None] >= r[None, :], scores, 0.0)
            bo = tl.dot(scores.to(DT), bv, bo) * scale
            store_rows(o, bo, token, rows, head, b, H, V, C, BV, SIGN, EVEN)
    for part in tl.static_range(PARTS):
        end = S[part] * last[part][:, None]
        if ENDS_ONLY:
            row = place.to(tl.int64) * H + head
            store_state(final, end, row, part * BK, b, K, V, BK, BV)
            if b == 0:
                i = part * BK + ck
                tl.store(segment_decay + row * K + i, tl.exp(2 * total[part]), mask=i < K)
        elif ends_sequence(segment, False):
            store_state(final, end, seq.to(tl.int64) * H + head, part * BK, b, K, V, BK, BV)
