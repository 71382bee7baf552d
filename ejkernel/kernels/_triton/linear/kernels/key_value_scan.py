"""Scans of calls with gates on keys and values, from what `gated_rows` and `weak_rows` left of either axis.

    forward:  S' = D_k S D_v + kd^T vd       kept: S before every chunk
    adjoint:  dS' = D_k dS D_v + qd^T dod    kept: dS after every chunk, going back in time

`scan_states` does either from the rows of both axes, a chunk being one product. `scan_key_value` needs those of the keys alone
and makes the outputs of weakly gated chunks on its way. Step by step in float32 every result would be rounded once; so every
operand is high and low part of bfloat16, [.., 2, rows, channels], and a result's own rounding is all that is seen of any.
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
from ejkernel.kernels._triton.linear.kernels.tiles import (
    before,
    channel_log_decay,
    dot_split,
    exp_of_log,
    load_rows,
    low_part,
    onwards,
    program_at,
    store_rows,
    store_state,
    sums_of_columns,
    weak_from,
)


@triton.jit
def scan_states(
    ad, bd, chunk_decay_a, chunk_decay_b, begin, ends, end_decay_a, end_decay_b, segments, NT, NS, SC,
    states, final, segment_decay_a, segment_decay_b,
    H: tl.constexpr, DA: tl.constexpr, DB: tl.constexpr, PA: tl.constexpr, PB: tl.constexpr, BA: tl.constexpr,
    BB: tl.constexpr, ADJOINT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs: tiles of a * tiles of b * segments * heads. ad [chunks, H, 2, 64, PA], bd [chunks, H, 2, 64, PB], their decays.

    states [chunks, H, 2, DA, DB]. With segment_decay_a given only each segment's end (in final) and its decays are left.
    """
    C: tl.constexpr = 64
    TA: tl.constexpr = (DA + BA - 1) // BA
    TB: tl.constexpr = (DB + BB - 1) // BB
    ENDS_ONLY: tl.constexpr = segment_decay_a is not None
    tile, head, unit = program_at(TA * TB, H)
    b = (tile % TB) * BB
    a = (tile // TB) * BA
    segment, idle = scanned_segment(segments, unit, NT, NS, SC, ADJOINT, ENDS_ONLY)
    if idle:
        return
    last = ends_sequence(segment, ADJOINT)
    g, first, count, seq, _place, _total = segment
    r = tl.arange(0, C)[:, None]
    i = a + tl.arange(0, BA)
    j = b + tl.arange(0, BB)
    S = state_at_start(begin, ends, end_decay_a, end_decay_b, segment, head, a, b, ADJOINT, H, DA, DB, DB, 1, BA, BB, 0)
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
        va_low = tl.load(ad + at_a + C * PA)
        vb = tl.load(bd + at_b)  # [C, BB]
        vb_low = tl.load(bd + at_b + C * PB)
        ta = tl.load(chunk_decay_a + index * PA + i)
        tb = tl.load(chunk_decay_b + index * PB + j)
        if ENDS_ONLY:
            kept_a *= ta
            kept_b *= tb
        else:
            store_state(states, S, index * 2, a, b, DA, DB, BA, BB)
            store_state(states, low_part(S, S.to(states.dtype.element_ty)), index * 2 + 1, a, b, DA, DB, BA, BB)
        S = dot_split(tl.trans(va), tl.trans(va_low), vb, vb_low, S * (ta[:, None] * tb[None, :]))
    if ENDS_ONLY:
        at = g.to(tl.int64) * H + head
        store_state(final, S, at, a, b, DA, DB, BA, BB)
        if b == 0:
            tl.store(segment_decay_a + at * DA + i, kept_a, mask=i < DA)
        if a == 0:
            tl.store(segment_decay_b + at * DB + j, kept_b, mask=j < DB)
    else:
        if last:
            store_state(final, S, seq.to(tl.int64) * H + head, a, b, DA, DB, BA, BB)


@triton.jit
def _store_part(states, S, index, a, b, K: tl.constexpr, V: tl.constexpr, PART: tl.constexpr, BV: tl.constexpr):
    """Writes a state's part [BV, PART] from (a, b) on, high and low part."""
    S0 = S.to(states.dtype.element_ty)
    store_state(states, tl.trans(S0), index * 2, a, b, K, V, PART, BV)
    store_state(states, tl.trans(low_part(S, S0)), index * 2 + 1, a, b, K, V, PART, BV)


@triton.jit
def _read_part(S, q, SIZE: tl.constexpr, acc):
    """acc + S q^T [BV, C] of a state's part and rows q, high and low part SIZE elements apart."""
    S0 = S.to(tl.bfloat16)
    return dot_split(S0, low_part(S, S0), tl.trans(tl.load(q)), tl.trans(tl.load(q + SIZE)), acc)


@triton.jit
def _chunk(
    S_first, S_second, qd, kd, chunk_decay, A, A_low, v, gv, weak, o, states, index, token, rows, head, b,
    H: tl.constexpr, HV: tl.constexpr, HG: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    SIGN: tl.constexpr, EVEN: tl.constexpr, KEEP: tl.constexpr, GATE_PARTS: tl.constexpr, ALL_WEAK: tl.constexpr,
):  # fmt: skip
    """The state's parts after a chunk, its decays by key channel in the same parts, and by value channel."""
    C: tl.constexpr = 64
    PART: tl.constexpr = KP // 2
    r = tl.arange(0, C)[:, None]
    ck = tl.arange(0, PART)
    at = index * (2 * C * KP) + (r * KP + ck[None, :])
    k_first = tl.load(kd + at)  # [C, PART]
    k_first_low = tl.load(kd + at + C * KP)
    k_second = tl.load(kd + at + PART)
    k_second_low = tl.load(kd + at + PART + C * KP)
    bv = tl.trans(load_rows(v, token, rows, head // (H // HV), b, HV, V, C, BV, SIGN, EVEN))  # [BV, C]
    logs = tl.trans(channel_log_decay(gv, None, None, token, rows, 0, head, b, False, H, HG, 1, V, C, BV, SIGN, EVEN))
    t_first = tl.load(chunk_decay + index * KP + ck)
    t_second = tl.load(chunk_decay + index * KP + PART + ck)
    # Values are decayed to the chunk's middle, as in `weak_rows`, and with the state from there to its end.
    whole = tl.sum(logs, 1)
    c = sums_of_columns(logs, onwards(C), GATE_PARTS) - (whole * 0.5)[:, None]  # [BV, C]
    if ALL_WEAK:
        upper = whole * 0.5
        lower = upper
        y = bv.to(tl.float32) * exp_of_log(-c)
    else:  # where that cannot be, to the end at once, by sums over just the rows after each
        is_weak = tl.load(weak + index) == 1
        upper = tl.where(is_weak, whole * 0.5, whole)
        lower = tl.where(is_weak, whole * 0.5, 0.0)
        y = bv.to(tl.float32) * exp_of_log(tl.where(is_weak, -c, sums_of_columns(logs, before(C), GATE_PARTS)))
    if states is not None:
        if KEEP:
            _store_part(states, S_first, index, 0, b, K, V, PART, BV)
            _store_part(states, S_second, index, PART, b, K, V, PART, BV)
        elif not ALL_WEAK:  # `gated_axis` will need it
            if not is_weak:
                _store_part(states, S_first, index, 0, b, K, V, PART, BV)
                _store_part(states, S_second, index, PART, b, K, V, PART, BV)
    y0 = y.to(k_first.dtype)
    y1 = low_part(y, y0)
    S_first *= exp_of_log(upper)[:, None]
    S_second *= exp_of_log(upper)[:, None]
    if o is not None:
        at_scores = index * (C * C) + (r * C + tl.arange(0, C)[None, :])
        bo = tl.zeros([BV, C], tl.float32)
        bo = dot_split(y0, y1, tl.trans(tl.load(A + at_scores)), tl.trans(tl.load(A_low + at_scores)), bo)
        bo = _read_part(S_first, qd + at, C * KP, bo)
        bo = _read_part(S_second, qd + at + PART, C * KP, bo)
        store_rows(o, tl.trans(bo * exp_of_log(c)), token, rows, head, b, H, V, C, BV, SIGN, EVEN)
    S_first = dot_split(y0, y1, k_first, k_first_low, S_first * t_first[None, :]) * exp_of_log(lower)[:, None]
    S_second = dot_split(y0, y1, k_second, k_second_low, S_second * t_second[None, :]) * exp_of_log(lower)[:, None]
    return S_first, S_second, t_first, t_second, exp_of_log(whole)


@triton.jit
def _scanned(
    S_first, S_second, qd, kd, chunk_decay, A, A_low, v, gv, weak, o, states, chunks, first, count, head, b, T, NT,
    H: tl.constexpr, HV: tl.constexpr, HG: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    SIGN: tl.constexpr, EVEN: tl.constexpr, KEEP: tl.constexpr, GATE_PARTS: tl.constexpr, STAGES: tl.constexpr,
    ALL_WEAK: tl.constexpr,
):  # fmt: skip
    """`_chunk` for all chunks of a segment."""
    decay_first = tl.full([KP // 2], 1.0, tl.float32)
    decay_second = tl.full([KP // 2], 1.0, tl.float32)
    segment_decay_v = tl.full([BV], 1.0, tl.float32)
    token0, rows_left = rows_of_segment(chunks, first, count, T, NT, 64, SIGN)
    for n in tl.range(count, num_stages=STAGES):
        s, token, rows = chunk_in_turn(first, count, token0, rows_left, n, False, 64, SIGN)
        index = s.to(tl.int64) * H + head
        S_first, S_second, t_first, t_second, tv = _chunk(
            S_first, S_second, qd, kd, chunk_decay, A, A_low, v, gv, weak, o, states, index, token, rows, head, b, H, HV, HG,
            K, KP, V, BV, SIGN, EVEN, KEEP, GATE_PARTS, ALL_WEAK,
        )  # fmt: skip
        decay_first *= t_first
        decay_second *= t_second
        segment_decay_v *= tv
    return S_first, S_second, decay_first, decay_second, segment_decay_v


@triton.jit
def scan_key_value(
    qd, kd, chunk_decay, A, A_low, v, gv, weak, begin, ends, end_decay, end_decay_v, chunks, segments, T, NT, NS, SC,
    o, final, states, segment_decay, segment_decay_v,
    H: tl.constexpr, HV: tl.constexpr, HG: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    SIGN: tl.constexpr, EVEN: tl.constexpr, KEEP: tl.constexpr, GATE_PARTS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs: value tiles * segments * heads. With segment_decay given: only each segment's end (in final) and its decays.

    qd, kd [chunks, H, 2, 64, KP], A and A_low [chunks, H, 64, 64], chunk_decay [chunks, H, KP]: of the keys.
    o [tokens, H, V]: of chunks whose values are `weak` [chunks, H]; anything in the others, for which `gated_axis` is to come.
    states [chunks, H, 2, K, V]: before each chunk, or, unless KEEP, before each that is not weakly gated.

    The state is held transposed, as the left operand of its product with q, which the tensor cores take from registers, and in
    two parts of key channels, of which one at a time is there as high and low part as well.
    """
    PART: tl.constexpr = KP // 2
    ENDS_ONLY: tl.constexpr = segment_decay is not None
    TV: tl.constexpr = (V + BV - 1) // BV
    tile, head, unit = program_at(TV, H)
    b = tile * BV
    segment, idle = scanned_segment(segments, unit, NT, NS, SC, False, ENDS_ONLY)
    if idle:
        return
    last = ends_sequence(segment, False)
    g, first, count, seq, _place, _total = segment
    S_first = state_at_start(begin, ends, end_decay_v, end_decay, segment, head, b, 0, False, H, V, K, 1, V, BV, PART, 0)
    S_second = state_at_start(begin, ends, end_decay_v, end_decay, segment, head, b, PART, False, H, V, K, 1, V, BV, PART, 0)
    # Two loops: the branches of the second take registers that the first is faster with (0.28 against 0.37 ms).
    if weak_from(weak, first, count, head, H):
        S_first, S_second, decay_first, decay_second, decay_values = _scanned(
            S_first, S_second, qd, kd, chunk_decay, A, A_low, v, gv, weak, o, states, chunks, first, count, head, b, T, NT, H,
            HV, HG, K, KP, V, BV, SIGN, EVEN, KEEP, GATE_PARTS, STAGES, True,
        )  # fmt: skip
    else:
        S_first, S_second, decay_first, decay_second, decay_values = _scanned(
            S_first, S_second, qd, kd, chunk_decay, A, A_low, v, gv, weak, o, states, chunks, first, count, head, b, T, NT, H,
            HV, HG, K, KP, V, BV, SIGN, EVEN, KEEP, GATE_PARTS, STAGES, False,
        )  # fmt: skip
    row = seq.to(tl.int64) * H + head
    if ENDS_ONLY:
        row = g.to(tl.int64) * H + head
        ck = tl.arange(0, PART)
        cv = b + tl.arange(0, BV)
        if b == 0:
            tl.store(segment_decay + row * K + ck, decay_first, mask=ck < K)
            tl.store(segment_decay + row * K + PART + ck, decay_second, mask=PART + ck < K)
        tl.store(segment_decay_v + row * V + cv, decay_values, mask=cv < V)
    if ENDS_ONLY or last:
        store_state(final, tl.trans(S_first), row, 0, b, K, V, PART, BV)
        store_state(final, tl.trans(S_second), row, PART, b, K, V, PART, BV)
