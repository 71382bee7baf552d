"""Calls with decays per key and per value channel: what walks their states, from what `_key.prepare` left.

    forward:  S' = tot_k S tot_v + kd^T vd       kept: S before every chunk
    adjoint:  dS' = tot_k dS tot_v + qd^T dod    kept: dS after every chunk, walking back in time

`walk_prepared` does either from both sides as they were prepared, a chunk being one product. `outputs` needs the key side alone
and makes the outputs of mild chunks on its way. Step by step in float32 every result would be rounded once; so every operand is
bfloat16 and its rest, [.., 2, rows, channels], and a result's own rounding is all that is seen of any.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ejkernel.kernels._triton.recurrent._tiles import (
    before,
    channel_log_decay,
    dot_of_halves,
    exp_of_log,
    load_rows,
    mild_from,
    onwards,
    program_at,
    rest_of,
    store_rows,
    store_state,
    sums_of_columns,
)
from ejkernel.kernels._triton.recurrent._walk import rows_of, segment_at, slot_of, start_of, walked_last


@triton.jit
def walk_prepared(
    ad, bd, tot_a, tot_b, begin, ends, end_decay_a, end_decay_b, segments, NT, NS, SC,
    states, final, decay_a, decay_b,
    H: tl.constexpr, DA: tl.constexpr, DB: tl.constexpr, PA: tl.constexpr, PB: tl.constexpr, BA: tl.constexpr,
    BB: tl.constexpr, ADJOINT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs: tiles of a * tiles of b * segments * heads. ad [slots, H, 2, 64, PA], bd [slots, H, 2, 64, PB], their decays.

    states [slots, H, 2, DA, DB]. With decay_a given only each segment's end (in final) and its decays are left; states is None.
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
        at_a = index * (2 * C * PA) + (r * PA + i[None, :])
        at_b = index * (2 * C * PB) + (r * PB + j[None, :])
        va = tl.load(ad + at_a)  # [C, BA]
        va_rest = tl.load(ad + at_a + C * PA)
        vb = tl.load(bd + at_b)  # [C, BB]
        vb_rest = tl.load(bd + at_b + C * PB)
        ta = tl.load(tot_a + index * PA + i)
        tb = tl.load(tot_b + index * PB + j)
        if SEGMENT:
            kept_a *= ta
            kept_b *= tb
        else:
            store_state(states, S, index * 2, a, b, DA, DB, BA, BB)
            store_state(states, rest_of(S, S.to(states.dtype.element_ty)), index * 2 + 1, a, b, DA, DB, BA, BB)
        S = dot_of_halves(tl.trans(va), tl.trans(va_rest), vb, vb_rest, S * (ta[:, None] * tb[None, :]))
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


@triton.jit
def _store_part(states, S, index, a, b, K: tl.constexpr, V: tl.constexpr, PART: tl.constexpr, BV: tl.constexpr):
    """Writes a state's part [BV, PART] from (a, b) on in two halves."""
    S0 = S.to(states.dtype.element_ty)
    store_state(states, tl.trans(S0), index * 2, a, b, K, V, PART, BV)
    store_state(states, tl.trans(rest_of(S, S0)), index * 2 + 1, a, b, K, V, PART, BV)


@triton.jit
def _read_part(S, q, SIZE: tl.constexpr, acc):
    """acc + S q^T [BV, C] of a state's part and rows q in two halves, SIZE elements apart."""
    S0 = S.to(tl.bfloat16)
    return dot_of_halves(S0, rest_of(S, S0), tl.trans(tl.load(q)), tl.trans(tl.load(q + SIZE)), acc)


@triton.jit
def _chunk(
    S_low, S_high, qd, kd, tot, A, rest, v, gv, mild, o, states, index, token, rows, head, b,
    H: tl.constexpr, HV: tl.constexpr, HG: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    SIGN: tl.constexpr, EVEN: tl.constexpr, KEEP: tl.constexpr, PIECES: tl.constexpr, ALL_MILD: tl.constexpr,
):  # fmt: skip
    """The state's parts after a chunk, its decays by key channel in the same parts, and by value channel."""
    C: tl.constexpr = 64
    PART: tl.constexpr = KP // 2
    r = tl.arange(0, C)[:, None]
    ck = tl.arange(0, PART)
    at = index * (2 * C * KP) + (r * KP + ck[None, :])
    k_low = tl.load(kd + at)  # [C, PART]
    k_low_rest = tl.load(kd + at + C * KP)
    k_high = tl.load(kd + at + PART)
    k_high_rest = tl.load(kd + at + PART + C * KP)
    bv = tl.trans(load_rows(v, token, rows, head // (H // HV), b, HV, V, C, BV, SIGN, EVEN))  # [BV, C]
    logs = tl.trans(channel_log_decay(gv, None, None, token, rows, 0, head, b, False, H, HG, 1, V, C, BV, SIGN, EVEN))
    t_low = tl.load(tot + index * KP + ck)
    t_high = tl.load(tot + index * KP + PART + ck)
    # Values are decayed to the chunk's middle, as in `_mild`, and with the state from there to its end.
    whole = tl.sum(logs, 1)
    c = sums_of_columns(logs, onwards(C), PIECES) - (whole * 0.5)[:, None]  # [BV, C]
    if ALL_MILD:
        upper = whole * 0.5
        lower = upper
        y = bv.to(tl.float32) * exp_of_log(-c)
    else:  # where that cannot be, to the end at once, by sums over just the rows after each
        is_mild = tl.load(mild + index) == 1
        upper = tl.where(is_mild, whole * 0.5, whole)
        lower = tl.where(is_mild, whole * 0.5, 0.0)
        y = bv.to(tl.float32) * exp_of_log(tl.where(is_mild, -c, sums_of_columns(logs, before(C), PIECES)))
    if states is not None:
        if KEEP:
            _store_part(states, S_low, index, 0, b, K, V, PART, BV)
            _store_part(states, S_high, index, PART, b, K, V, PART, BV)
        elif not ALL_MILD:  # `_side` will need it
            if not is_mild:
                _store_part(states, S_low, index, 0, b, K, V, PART, BV)
                _store_part(states, S_high, index, PART, b, K, V, PART, BV)
    y0 = y.to(k_low.dtype)
    y1 = rest_of(y, y0)
    S_low *= exp_of_log(upper)[:, None]
    S_high *= exp_of_log(upper)[:, None]
    if o is not None:
        pair = index * (C * C) + (r * C + tl.arange(0, C)[None, :])
        bo = tl.zeros([BV, C], tl.float32)
        bo = dot_of_halves(y0, y1, tl.trans(tl.load(A + pair)), tl.trans(tl.load(rest + pair)), bo)
        bo = _read_part(S_low, qd + at, C * KP, bo)
        bo = _read_part(S_high, qd + at + PART, C * KP, bo)
        store_rows(o, tl.trans(bo * exp_of_log(c)), token, rows, head, b, H, V, C, BV, SIGN, EVEN)
    S_low = dot_of_halves(y0, y1, k_low, k_low_rest, S_low * t_low[None, :]) * exp_of_log(lower)[:, None]
    S_high = dot_of_halves(y0, y1, k_high, k_high_rest, S_high * t_high[None, :]) * exp_of_log(lower)[:, None]
    return S_low, S_high, t_low, t_high, exp_of_log(whole)


@triton.jit
def _walked(
    S_low, S_high, qd, kd, tot, A, rest, v, gv, mild, o, states, slots, first, count, head, b, T, NT,
    H: tl.constexpr, HV: tl.constexpr, HG: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    SIGN: tl.constexpr, EVEN: tl.constexpr, KEEP: tl.constexpr, PIECES: tl.constexpr, STAGES: tl.constexpr,
    ALL_MILD: tl.constexpr,
):  # fmt: skip
    """`_chunk` for all chunks of a segment."""
    decay_low = tl.full([KP // 2], 1.0, tl.float32)
    decay_high = tl.full([KP // 2], 1.0, tl.float32)
    decay_v = tl.full([BV], 1.0, tl.float32)
    token0, rows_left = rows_of(slots, first, count, T, NT, 64, SIGN)
    for n in tl.range(count, num_stages=STAGES):
        s, token, rows = slot_of(first, count, token0, rows_left, n, False, 64, SIGN)
        index = s.to(tl.int64) * H + head
        S_low, S_high, t_low, t_high, tv = _chunk(
            S_low, S_high, qd, kd, tot, A, rest, v, gv, mild, o, states, index, token, rows, head, b, H, HV, HG, K, KP, V, BV,
            SIGN, EVEN, KEEP, PIECES, ALL_MILD,
        )  # fmt: skip
        decay_low *= t_low
        decay_high *= t_high
        decay_v *= tv
    return S_low, S_high, decay_low, decay_high, decay_v


@triton.jit
def outputs(
    qd, kd, tot, A, rest, v, gv, mild, begin, ends, end_decay, end_decay_v, slots, segments, T, NT, NS, SC,
    o, final, states, decay, decay_v,
    H: tl.constexpr, HV: tl.constexpr, HG: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    SIGN: tl.constexpr, EVEN: tl.constexpr, KEEP: tl.constexpr, PIECES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs: value tiles * segments * heads. With decay given: only each segment's end (in final) and its decays.

    qd, kd [slots, H, 2, 64, KP], A and rest [slots, H, 64, 64], tot [slots, H, KP]: the key side of `_mild` and `_key`.
    o [tokens, H, V]: of chunks whose values are `mild` [slots, H]; anything in the others, for which `_side` is to come.
    states [slots, H, 2, K, V]: before each chunk, or, unless KEEP, before each that is not mild.

    The state is held transposed, as the left operand of its product with q, which the tensor cores take from registers, and in
    two parts of key channels, of which one at a time is there in halves as well.
    """
    PART: tl.constexpr = KP // 2
    SEGMENT: tl.constexpr = decay is not None
    TV: tl.constexpr = (V + BV - 1) // BV
    tile, head, unit = program_at(TV, H)
    b = tile * BV
    g, first, count, seq, place, total = segment_at(segments, unit, NT, NS, SC)
    if seq < 0:
        return
    last = walked_last(place, total, False)
    if SEGMENT:
        if last:
            return
    S_low = start_of(begin, ends, end_decay_v, end_decay, g, seq, place, total, head, b, 0, False, H, V, K, 1, V, BV, PART, 0)
    S_high = start_of(
        begin, ends, end_decay_v, end_decay, g, seq, place, total, head, b, PART, False, H, V, K, 1, V, BV, PART, 0
    )
    # Two loops: the branches of the second take registers that the first is faster with (0.28 against 0.37 ms).
    if mild_from(mild, first, count, head, H):
        S_low, S_high, decay_low, decay_high, decay_values = _walked(
            S_low, S_high, qd, kd, tot, A, rest, v, gv, mild, o, states, slots, first, count, head, b, T, NT, H, HV, HG, K,
            KP, V, BV, SIGN, EVEN, KEEP, PIECES, STAGES, True,
        )  # fmt: skip
    else:
        S_low, S_high, decay_low, decay_high, decay_values = _walked(
            S_low, S_high, qd, kd, tot, A, rest, v, gv, mild, o, states, slots, first, count, head, b, T, NT, H, HV, HG, K,
            KP, V, BV, SIGN, EVEN, KEEP, PIECES, STAGES, False,
        )  # fmt: skip
    row = seq.to(tl.int64) * H + head
    if SEGMENT:
        row = g.to(tl.int64) * H + head
        ck = tl.arange(0, PART)
        cv = b + tl.arange(0, BV)
        if b == 0:
            tl.store(decay + row * K + ck, decay_low, mask=ck < K)
            tl.store(decay + row * K + PART + ck, decay_high, mask=PART + ck < K)
        tl.store(decay_v + row * V + cv, decay_values, mask=cv < V)
    if SEGMENT or last:
        store_state(final, tl.trans(S_low), row, 0, b, K, V, PART, BV)
        store_state(final, tl.trans(S_high), row, PART, b, K, V, PART, BV)
