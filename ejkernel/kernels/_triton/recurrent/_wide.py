"""`_key.outputs` for states of 129 to 256 key channels, where reading q and k once for each value tile is what takes the time.

Tiles of 128 value channels read them half as often as tiles of 64. Such a tile of the state fills most of the registers, so it
is held transposed, as the left operand that its product with q can take from there, and in two halves of 128 key channels.
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
    g = pid // TV
    first, count, seq, place, total = segment_at(segments, g, NT, NS, SC)
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
    S0 = tl.zeros([BV, HALF], tl.float32)
    S1 = tl.zeros([BV, HALF], tl.float32)
    kept0 = tl.full([HALF], 1.0, tl.float32)
    kept1 = tl.full([HALF], 1.0, tl.float32)
    if begin is not None:
        S0 += load_state(begin, row, b, 0, V, K, 1, V, BV, HALF).to(tl.float32)
        S1 += load_state(begin, row, b, HALF, V, K, 1, V, BV, HALF).to(tl.float32)
    if ends is not None:
        S0 = _combined(S0, ends, end_decay, g, place, total, head, 0, b, ADJOINT, H, K, V, HALF, BV)
        S1 = _combined(S1, ends, end_decay, g, place, total, head, HALF, b, ADJOINT, H, K, V, HALF, BV)
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
            if states is not None:
                _store(states, S0, index, 0, b, K, V, HALF, BV)
                _store(states, S1, index, HALF, b, K, V, HALF, BV)
            bq0 = tl.load(qd + tile)
            bq1 = tl.load(qd + tile + HALF)
            ba = tl.load(A + index * (C * C) + r[:, None] * C + r[None, :])  # [C, C]
            if not ADJOINT:
                ba = tl.trans(ba)
            bo = tl.dot(S0.to(bq0.dtype), tl.trans(bq0))  # [BV, C]
            bo = tl.dot(S1.to(bq1.dtype), tl.trans(bq1), bo)
            bo = tl.dot(tl.trans(bv), ba, bo)
            store_rows(o, tl.trans(bo.to(o.dtype.element_ty)), token, rows, head, b, H, V, C, BV, SIGN, EVEN)
        S0 = tl.dot(tl.trans(bv), bk0, S0 * t0[None, :])
        S1 = tl.dot(tl.trans(bv), bk1, S1 * t1[None, :])
    if SEGMENT:
        at = g.to(tl.int64) * H + head
        _store(final, S0, at, 0, b, K, V, HALF, BV)
        _store(final, S1, at, HALF, b, K, V, HALF, BV)
        if b == 0:
            tl.store(decay + at * K + ck, kept0)
            tl.store(decay + at * K + HALF + ck, kept1, mask=HALF + ck < K)
    else:
        if last:
            _store(final, S0, row, 0, b, K, V, HALF, BV)
            _store(final, S1, row, HALF, b, K, V, HALF, BV)


@triton.jit
def _store(x, S, index, a, b, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    store_state(x, tl.trans(S.to(x.dtype.element_ty)), index, a, b, K, V, BK, BV)


@triton.jit
def _combined(
    S, ends, decay, g, place, total, head, a, b, ADJOINT: tl.constexpr, H: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    return tl.trans(combined(tl.trans(S), ends, decay, None, g, place, total, head, a, b, ADJOINT, H, K, V, BK, BV))
