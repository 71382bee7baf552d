"""`_key.outputs` forward for states of 256 key channels, of which each tile of values reads all of q and k again.

With 128 value channels a program they are read half as often as with 64. The state is held transposed: so it is the left
operand of its product with q, which the tensor cores take from registers, and shared memory is left for the rows of the next
chunk to come in while this one is computed (H200, (8, 4096, 4, 256, 512): 0.244 ms, 0.347 without that, 0.328 by `outputs`).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ejkernel.kernels._triton.recurrent._tiles import load_rows, load_state, program_at, store_rows, store_state
from ejkernel.kernels._triton.recurrent._walk import combined, rows_of, segment_at, slot_of


@triton.jit
def wide_outputs(
    qd, kd, tot, A, v, begin, ends, end_decay, slots, segments, T, NT, NS, SC,
    o, final,
    H: tl.constexpr, HV: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, SIGN: tl.constexpr,
    EVEN: tl.constexpr, ALIKE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs: value tiles * segments * heads. ALIKE: all channels of `tot` decay alike."""
    C: tl.constexpr = 64
    TV: tl.constexpr = (V + BV - 1) // BV
    tile, head, unit = program_at(TV, H)
    b = tile * BV
    g, first, count, seq, place, total = segment_at(segments, unit, NT, NS, SC)
    if seq < 0:
        return
    row = seq.to(tl.int64) * H + head
    r = tl.arange(0, C)
    ck = tl.arange(0, KP)
    S = tl.zeros([BV, KP], tl.float32)
    if begin is not None:
        S += load_state(begin, row, b, 0, V, K, 1, V, BV, KP).to(tl.float32)
    if ends is not None:
        S = combined(S, ends, None, end_decay, g, place, total, head, b, 0, False, H, V, K, 1, V, BV, KP)
    token0, rows_left = rows_of(slots, first, count, T, NT, C, SIGN)
    for n in tl.range(count, num_stages=STAGES):
        s, token, rows = slot_of(first, count, token0, rows_left, n, False, C, SIGN)
        index = s.to(tl.int64) * H + head
        at = index * (C * KP) + (r[:, None] * KP + ck[None, :])
        bq = tl.load(qd + at)  # [C, KP]
        bk = tl.load(kd + at)
        bv = tl.trans(load_rows(v, token, rows, head // (H // HV), b, HV, V, C, BV, SIGN, EVEN).to(bk.dtype))  # [BV, C]
        ba = tl.load(A + index * (C * C) + r[:, None] * C + r[None, :])  # [C, C]
        bo = tl.dot(bv, tl.trans(ba), tl.dot(S.to(bq.dtype), tl.trans(bq)))  # [BV, C]
        if ALIKE:
            S *= tl.load(tot + index * KP)
        else:
            S *= tl.load(tot + index * KP + ck)[None, :]
        S = tl.dot(bv, bk, S)
        store_rows(o, tl.trans(bo), token, rows, head, b, H, V, C, BV, SIGN, EVEN)
    if place == total - 1:
        store_state(final, tl.trans(S), row, 0, b, K, V, KP, BV)
