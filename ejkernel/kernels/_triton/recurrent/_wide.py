"""`_key.outputs` for states of 256 key channels, of which each tile of values reads all of q and k again.

With 128 value channels a program they are read half as often as with 64. The state is held transposed, in two halves of key
channels: so it is the left operand of its product with q, which the tensor cores take from registers, and shared memory is left
for the rows of the next chunk to come in while this one is computed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ejkernel.kernels._triton.recurrent._tiles import load_rows, program_at, store_rows, store_state
from ejkernel.kernels._triton.recurrent._walk import rows_of, segment_at, slot_of, start_of, walked_last


@triton.jit
def wide_outputs(
    qd, kd, tot, A, rest, v, begin, ends, end_decay, slots, segments, T, NT, NS, SC,
    o, final, states,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, SIGN: tl.constexpr,
    EVEN: tl.constexpr, ADJOINT: tl.constexpr, ALIKE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs: value tiles * segments * heads. ALIKE: all channels of `tot` decay alike. All else as in `_key.outputs`."""
    C: tl.constexpr = 64
    HALF: tl.constexpr = KP // 2
    TV: tl.constexpr = (V + BV - 1) // BV
    tile, head, unit = program_at(TV, H)
    b = tile * BV
    g, first, count, seq, place, total = segment_at(segments, unit, NT, NS, SC)
    if seq < 0:
        return
    r = tl.arange(0, C)
    c = tl.arange(0, HALF)
    S0 = start_of(begin, ends, None, end_decay, g, seq, place, total, head, b, 0, ADJOINT, H, V, K, 1, V, BV, HALF, 0)
    S1 = start_of(begin, ends, None, end_decay, g, seq, place, total, head, b, HALF, ADJOINT, H, V, K, 1, V, BV, HALF, 0)
    token0, rows_left = rows_of(slots, first, count, T, NT, C, SIGN)
    for n in tl.range(count, num_stages=STAGES):
        s, token, rows = slot_of(first, count, token0, rows_left, n, ADJOINT, C, SIGN)
        index = s.to(tl.int64) * H + head
        at = index * (C * KP) + (r[:, None] * KP + c[None, :])
        q0 = tl.load(qd + at)  # [C, HALF]
        q1 = tl.load(qd + at + HALF)
        k0 = tl.load(kd + at)
        k1 = tl.load(kd + at + HALF)
        bv = tl.trans(load_rows(v, token, rows, head // (H // HV), b, HV, V, C, BV, SIGN, EVEN).to(k0.dtype))  # [BV, C]
        pair = index * (C * C) + (r[:, None] * C + r[None, :])
        ba = tl.load(A + pair)  # [C, C]
        if not ADJOINT:
            ba = tl.trans(ba)
        B0 = S0.to(k0.dtype)
        B1 = S1.to(k0.dtype)
        if states is not None:
            store_state(states, tl.trans(B0), index, 0, b, K, V, HALF, BV)
            store_state(states, tl.trans(B1), index, HALF, b, K, V, HALF, BV)
        bo = tl.dot(B1, tl.trans(q1), tl.dot(B0, tl.trans(q0), tl.dot(bv, ba)))  # [BV, C]
        if rest is not None:
            ba = tl.load(rest + pair)
            if not ADJOINT:
                ba = tl.trans(ba)
            bo = tl.dot(bv, ba, bo)
        if ALIKE:
            decay = tl.load(tot + index * KP)
            S0 *= decay
            S1 *= decay
        else:
            S0 *= tl.load(tot + index * KP + c)[None, :]
            S1 *= tl.load(tot + index * KP + HALF + c)[None, :]
        S0 = tl.dot(bv, k0, S0)
        S1 = tl.dot(bv, k1, S1)
        store_rows(o, tl.trans(bo), token, rows, head, b, H, V, C, BV, SIGN, EVEN)
    if walked_last(place, total, ADJOINT):
        row = seq.to(tl.int64) * H + head
        store_state(final, tl.trans(S0), row, 0, b, K, V, HALF, BV)
        store_state(final, tl.trans(S1), row, HALF, b, K, V, HALF, BV)
