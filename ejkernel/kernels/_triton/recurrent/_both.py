"""The state walk of calls with decays per key and per value channel, from what `_key.prepare` left of both sides.

    forward:  S' = tot_k S tot_v + kd^T vd       kept: S before every chunk
    adjoint:  dS' = tot_k dS tot_v + qd^T dod    kept: dS after every chunk, walking back in time

`_walk.walk` does the same from the arrays themselves; here the decays are in them already and a chunk is one product.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ejkernel.kernels._triton.recurrent._tiles import program_at, store_state
from ejkernel.kernels._triton.recurrent._walk import segment_at, start_of, walked_last


@triton.jit
def walk_prepared(
    ad, bd, tot_a, tot_b, begin, ends, end_decay_a, end_decay_b, segments, NT, NS, SC,
    states, final, decay_a, decay_b,
    H: tl.constexpr, DA: tl.constexpr, DB: tl.constexpr, PA: tl.constexpr, PB: tl.constexpr, BA: tl.constexpr,
    BB: tl.constexpr, ADJOINT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs: tiles of a * tiles of b * segments * heads. ad [slots, H, 64, PA], bd [slots, H, 64, PB], and their decays.

    With decay_a given only each segment's end (in final) and its decays are left, and states is None.
    """
    C: tl.constexpr = 64
    TA: tl.constexpr = (DA + BA - 1) // BA
    TB: tl.constexpr = (DB + BB - 1) // BB
    SEGMENT: tl.constexpr = decay_a is not None
    tile, head, unit = program_at(TA * TB, H)
    b = (tile % TB) * BB
    a = (tile // TB) * BA
    g, first, count, seq, place, total = segment_at(segments, unit, NT, NS, SC)
    if seq < 0:
        return
    last = walked_last(place, total, ADJOINT)
    if SEGMENT:
        if last:
            return
    r = tl.arange(0, C)[:, None]
    i = a + tl.arange(0, BA)
    j = b + tl.arange(0, BB)
    S = start_of(begin, ends, end_decay_a, end_decay_b, g, seq, place, total, head, a, b, ADJOINT, H, DA, DB, DB, 1, BA, BB, 0)
    kept_a = tl.full([BA], 1.0, tl.float32)
    kept_b = tl.full([BB], 1.0, tl.float32)
    for n in tl.range(count, num_stages=STAGES):
        s = first + n
        if ADJOINT:
            s = first + count - 1 - n
        index = s.to(tl.int64) * H + head
        va = tl.load(ad + index * (C * PA) + (r * PA + i[None, :]))  # [C, BA]
        vb = tl.load(bd + index * (C * PB) + (r * PB + j[None, :]))  # [C, BB]
        ta = tl.load(tot_a + index * PA + i)
        tb = tl.load(tot_b + index * PB + j)
        if SEGMENT:
            kept_a *= ta
            kept_b *= tb
        else:
            store_state(states, S, index, a, b, DA, DB, BA, BB)
        S = tl.dot(tl.trans(va), vb, S * (ta[:, None] * tb[None, :]))
    if SEGMENT:
        at = g.to(tl.int64) * H + head
        store_state(final, S, at, a, b, DA, DB, BA, BB)
        if b == 0:
            tl.store(decay_a + at * DA + i, kept_a, mask=i < DA)
        if a == 0:
            tl.store(decay_b + at * DB + j, kept_b, mask=j < DB)
    else:
        if last:
            store_state(final, S, seq.to(tl.int64) * H + head, a, b, DA, DB, BA, BB)
