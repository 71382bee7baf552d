"""Outputs of chunks from their gated rows: a scan of what `gated_rows`, `weak_rows` or `head_gate_rows` left, bfloat16.

    o = A v + qd S,   S' = D S + kd^T v          qd = scale q pre, kd = k suf, A the intra-chunk scores, D the chunk's decay

`scan_rows` holds all key channels of a state for some value channels. For 256 key channels, of which each tile of values reads
all of q and k again, `scan_rows_wide` reads them half as often, with 128 value channels a program instead of 64. It holds the
state transposed, in two parts of key channels: so it is the left operand of its product with q, which the tensor cores take
from registers, and shared memory is left for the rows of the next chunk to come in while this one is computed.
"""

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
from ejkernel.kernels._triton.linear.kernels.tiles import load_rows, program_at, store_rows, store_state


@triton.jit
def scan_rows(
    qd, kd, chunk_decay, A, A_low, v, begin, ends, end_decay, chunks, segments, done, filled_o, filled_final, filled_states,
    T, NT, NS, SC,
    o, final, states, segment_decay,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, SIGN: tl.constexpr,
    EVEN: tl.constexpr, ADJOINT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs: value tiles * segments * heads. With segment_decay given: only each segment's end (in final) and decay.

    A_low: the low part of A, where that matters, else None. ADJOINT goes back in time with q * pre for kd, k * suf for qd and
    do for v: o is then dv, states the adjoints after every chunk.
    done [chunks, H]: not 0 in segments that `key_gate_scan_by_warpgroups` has scanned, else None. filled_*: memory shared with
    the outputs.
    """
    C: tl.constexpr = 64
    ENDS_ONLY: tl.constexpr = segment_decay is not None
    TV: tl.constexpr = (V + BV - 1) // BV
    tile, head, unit = program_at(TV, H)
    b = tile * BV
    segment, idle = scanned_segment(segments, unit, NT, NS, SC, ADJOINT, ENDS_ONLY)
    if idle:
        return
    last = ends_sequence(segment, ADJOINT)
    g, first, count, seq, _place, _total = segment
    if done is not None:
        if count == 0:
            return
        if tl.load(done + first.to(tl.int64) * H + head) != 0:
            return
    r = tl.arange(0, C)
    ck = tl.arange(0, KP)
    S = state_at_start(begin, ends, end_decay, None, segment, head, 0, b, ADJOINT, H, K, V, V, 1, KP, BV, 0)
    kept = tl.full([KP], 1.0, tl.float32)
    token0, rows_left = rows_of_segment(chunks, first, count, T, NT, C, SIGN)
    for n in tl.range(count, num_stages=STAGES):
        s, token, rows = chunk_in_turn(first, count, token0, rows_left, n, ADJOINT, C, SIGN)
        index = s.to(tl.int64) * H + head
        at = index * (C * KP) + (r[:, None] * KP + ck[None, :])
        bk = tl.load(kd + at)  # [C, KP]
        bv = load_rows(v, token, rows, head // (H // HV), b, HV, V, C, BV, SIGN, EVEN).to(bk.dtype)  # [C, BV]
        bt = tl.load(chunk_decay + index * KP + ck)  # [KP]
        if ENDS_ONLY:
            kept *= bt
        else:
            if states is not None:
                store_state(states, S, index, 0, b, K, V, KP, BV)
            bq = tl.load(qd + at)
            at_scores = index * (C * C) + (r[:, None] * C + r[None, :])
            ba = tl.load(A + at_scores)  # [C, C]
            if ADJOINT:
                ba = tl.trans(ba)
            bo = tl.dot(ba, bv, tl.dot(bq, S.to(bq.dtype)))
            if A_low is not None:
                ba = tl.load(A_low + at_scores)
                if ADJOINT:
                    ba = tl.trans(ba)
                bo = tl.dot(ba, bv, bo)
            store_rows(o, bo, token, rows, head, b, H, V, C, BV, SIGN, EVEN)
        S = tl.dot(tl.trans(bk), bv, S * bt[:, None])
    if ENDS_ONLY:
        at = g.to(tl.int64) * H + head
        store_state(final, S, at, 0, b, K, V, KP, BV)
        if b == 0:
            tl.store(segment_decay + at * K + ck, kept, mask=ck < K)
    else:
        if last:
            store_state(final, S, seq.to(tl.int64) * H + head, 0, b, K, V, KP, BV)


@triton.jit
def scan_rows_wide(
    qd, q_decay, kd, chunk_decay, A, A_low, v, begin, ends, end_decay, chunks, segments, T, NT, NS, SC,
    o, final, states,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, SIGN: tl.constexpr,
    EVEN: tl.constexpr, ADJOINT: tl.constexpr, ALIKE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs: value tiles * segments * heads. ALIKE: all channels of a chunk decay alike. All else as in `scan_rows`.

    q_decay [chunks, H, C]: where qd is q itself, [tokens, H, K], what its products with the state are multiplied by; else None.
    """
    C: tl.constexpr = 64
    HALF: tl.constexpr = KP // 2
    TV: tl.constexpr = (V + BV - 1) // BV
    tile, head, unit = program_at(TV, H)
    b = tile * BV
    segment, idle = scanned_segment(segments, unit, NT, NS, SC, ADJOINT, False)
    if idle:
        return
    _g, first, count, seq, _place, _total = segment
    r = tl.arange(0, C)
    c = tl.arange(0, HALF)
    S0 = state_at_start(begin, ends, None, end_decay, segment, head, b, 0, ADJOINT, H, V, K, 1, V, BV, HALF, 0)
    S1 = state_at_start(begin, ends, None, end_decay, segment, head, b, HALF, ADJOINT, H, V, K, 1, V, BV, HALF, 0)
    token0, rows_left = rows_of_segment(chunks, first, count, T, NT, C, SIGN)
    for n in tl.range(count, num_stages=STAGES):
        s, token, rows = chunk_in_turn(first, count, token0, rows_left, n, ADJOINT, C, SIGN)
        index = s.to(tl.int64) * H + head
        at = index * (C * KP) + (r[:, None] * KP + c[None, :])
        if q_decay is None:
            q0 = tl.load(qd + at)  # [C, HALF]
            q1 = tl.load(qd + at + HALF)
        else:
            q0 = load_rows(qd, token, rows, head, 0, H, K, C, HALF, SIGN, EVEN)
            q1 = load_rows(qd, token, rows, head, HALF, H, K, C, HALF, SIGN, EVEN)
        k0 = tl.load(kd + at)
        k1 = tl.load(kd + at + HALF)
        bv = tl.trans(load_rows(v, token, rows, head // (H // HV), b, HV, V, C, BV, SIGN, EVEN).to(k0.dtype))  # [BV, C]
        at_scores = index * (C * C) + (r[:, None] * C + r[None, :])
        ba = tl.load(A + at_scores)  # [C, C]
        if not ADJOINT:
            ba = tl.trans(ba)
        B0 = S0.to(k0.dtype)
        B1 = S1.to(k0.dtype)
        if states is not None:
            store_state(states, tl.trans(B0), index, 0, b, K, V, HALF, BV)
            store_state(states, tl.trans(B1), index, HALF, b, K, V, HALF, BV)
        if q_decay is None:
            bo = tl.dot(B1, tl.trans(q1), tl.dot(B0, tl.trans(q0), tl.dot(bv, ba)))  # [BV, C]
        else:
            bo = tl.dot(B1, tl.trans(q1), tl.dot(B0, tl.trans(q0)))
            bo = tl.dot(bv, ba, bo * tl.load(q_decay + index * C + r)[None, :])
        if A_low is not None:
            ba = tl.load(A_low + at_scores)
            if not ADJOINT:
                ba = tl.trans(ba)
            bo = tl.dot(bv, ba, bo)
        if ALIKE:
            decay = tl.load(chunk_decay + index * KP)
            S0 *= decay
            S1 *= decay
        else:
            S0 *= tl.load(chunk_decay + index * KP + c)[None, :]
            S1 *= tl.load(chunk_decay + index * KP + HALF + c)[None, :]
        S0 = tl.dot(bv, k0, S0)
        S1 = tl.dot(bv, k1, S1)
        store_rows(o, tl.trans(bo), token, rows, head, b, H, V, C, BV, SIGN, EVEN)
    if ends_sequence(segment, ADJOINT):
        row = seq.to(tl.int64) * H + head
        store_state(final, tl.trans(S0), row, 0, b, K, V, HALF, BV)
        store_state(final, tl.trans(S1), row, HALF, b, K, V, HALF, BV)
