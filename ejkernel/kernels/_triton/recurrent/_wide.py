"""`_key.outputs` for states of 129 to 256 key channels, where reading q and k once for each value tile is what takes the time.

Tiles of 128 value channels read them half as often as tiles of 64. Such a tile of the state fills most of the registers; it is
held in two halves of 128 key channels, of which one at a time is copied to shared memory for its product with q, so that the
next chunk's rows fit there too.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ejkernel.kernels._triton.recurrent._tiles import load_rows, load_state, slot_at, store_rows, store_state
from ejkernel.kernels._triton.recurrent._walk import combined, segment_at


@triton.jit
def wide_outputs(
    qd, kd, tot, A, v, begin, ends, end_decay, slots, segments, T, NT, NS, SC,
    o, final, states, decay,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, SIGN: tl.constexpr,
    EVEN: tl.constexpr, ADJOINT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Grid (value tiles * segments, heads): what `_key.outputs` leaves, for rows of 256 key channels."""
    C: tl.constexpr = 64
    HALF: tl.constexpr = 128
    SEGMENT: tl.constexpr = decay is not None
    TV: tl.constexpr = (V + BV - 1) // BV
    pid = tl.program_id(0)
    head = tl.program_id(1)
    b = (pid % TV) * BV
    g, first, count, seq, place, total = segment_at(segments, pid // TV, NT, NS, SC)
    if seq < 0:
        return
    last = place == total - 1  # whether this segment is walked last
    if ADJOINT:
        last = place == 0
    if SEGMENT:
        if last:  # nobody starts from its end
            return
    row = seq.to(tl.int64) * H + head
    r = tl.arange(0, C)
    ck = tl.arange(0, HALF)
    S0 = tl.zeros([HALF, BV], tl.float32)
    S1 = tl.zeros([HALF, BV], tl.float32)
    kept0 = tl.full([HALF], 1.0, tl.float32)
    kept1 = tl.full([HALF], 1.0, tl.float32)
    if begin is not None:
        S0 += load_state(begin, row, 0, b, K, V, V, 1, HALF, BV).to(tl.float32)
        S1 += load_state(begin, row, HALF, b, K, V, V, 1, HALF, BV).to(tl.float32)
    if ends is not None:
        S0 = combined(S0, ends, end_decay, None, g, place, total, head, 0, b, ADJOINT, H, K, V, HALF, BV)
        S1 = combined(S1, ends, end_decay, None, g, place, total, head, HALF, b, ADJOINT, H, K, V, HALF, BV)
    for n in tl.range(count, num_stages=STAGES):
        s = first + n
        if ADJOINT:
            s = first + count - 1 - n
        token, rows, _ = slot_at(slots, s, T, NT, C, SIGN)
        index = s.to(tl.int64) * H + head
        tile = index * (C * 2 * HALF) + (r[:, None] * (2 * HALF) + ck[None, :])
        bk0 = tl.load(kd + tile)  # [C, HALF]
        bk1 = tl.load(kd + tile + HALF)
        bv = load_rows(v, token, rows, head // (H // HV), b, HV, V, C, BV, SIGN, EVEN).to(bk0.dtype)  # [C, BV]
        t0 = tl.load(tot + index * (2 * HALF) + ck)  # [HALF]
        t1 = tl.load(tot + index * (2 * HALF) + HALF + ck)
        if SEGMENT:
            kept0 *= t0
            kept1 *= t1
        else:
            bq0 = tl.load(qd + tile)
            bq1 = tl.load(qd + tile + HALF)
            ba = tl.load(A + index * (C * C) + r[:, None] * C + r[None, :])  # [C, C]
            if ADJOINT:
                ba = tl.trans(ba)
            bo = tl.dot(ba, bv)  # [C, BV]
            B0 = S0.to(bq0.dtype)
            if states is not None:
                store_state(states, B0, index, 0, b, K, V, HALF, BV)
            bo = tl.dot(bq0, B0, bo)
            B1 = S1.to(bq1.dtype)
            if states is not None:
                store_state(states, B1, index, HALF, b, K, V, HALF, BV)
            bo = tl.dot(bq1, B1, bo)
            store_rows(o, bo, token, rows, head, b, H, V, C, BV, SIGN, EVEN)
        S0 = tl.dot(tl.trans(bk0), bv, S0 * t0[:, None])
        S1 = tl.dot(tl.trans(bk1), bv, S1 * t1[:, None])
    if SEGMENT:
        at = g.to(tl.int64) * H + head
        store_state(final, S0, at, 0, b, K, V, HALF, BV)
        store_state(final, S1, at, HALF, b, K, V, HALF, BV)
        if b == 0:
            tl.store(decay + at * K + ck, kept0)
            tl.store(decay + at * K + HALF + ck, kept1, mask=HALF + ck < K)
    else:
        if last:
            store_state(final, S0, row, 0, b, K, V, HALF, BV)
            store_state(final, S1, row, HALF, b, K, V, HALF, BV)
