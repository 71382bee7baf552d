"""The state walk: the one part of the chunked form that is serial in time.

    forward:  S' = tot_k S tot_v + (k suf_k)^T (v suf_v)          kept: S before every chunk
    adjoint:  dS' = tot_k dS tot_v + (scale q pre_k)^T (do pre_v)    kept: dS after every chunk, walking back in time

tot: product of a chunk's decays; pre: product up to and including a row; suf: product of the rows after it. Both are one
kernel over a pair (a, b): (k, v) or (q, do). A program walks one segment (a run of chunks of one sequence) of one head with
a tile [BA, BB] of the state in registers. When there are too few sequences and heads to fill the device, a first launch
(SEGMENT) walks every segment from zero and keeps only its end and its decay, and the second starts from their combination.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ejkernel.kernels._triton.recurrent._decays import constant_decay, head_decays
from ejkernel.kernels._triton.recurrent._tiles import (
    after,
    before,
    channel_log_decay,
    dot,
    load_rows,
    load_state,
    onwards,
    program_at,
    slot_at,
    store_state,
    sums,
    sums_of_columns,
    upto,
)


@triton.jit
def segment_at(segments, n, NT, NS, SC):
    """(segment, its first slot, slots, sequence, place in the sequence, the sequence's segments) of the n-th to be started.

    segments: table [6, NS] of packed calls, or None.
    """
    if segments is not None:
        g = tl.load(segments + n)
        first = tl.load(segments + NS + n)
        count = tl.load(segments + 2 * NS + n)
        seq = tl.load(segments + 3 * NS + n)
        place = tl.load(segments + 4 * NS + n)
        total = tl.load(segments + 5 * NS + n)
    else:
        g = n
        seq = n // NS
        place = n % NS
        total = NS
        first = seq * NT + place * SC
        count = tl.minimum(SC, NT - place * SC)
    return g, first, count, seq, place, total


@triton.jit
def rows_of(slots, first, count, T, NT, C: tl.constexpr, SIGN: tl.constexpr):
    """(token of the first row, rows) of a segment: its slots lie side by side, so a walk need not look up each of them."""
    token, _, _ = slot_at(slots, first, T, NT, C, SIGN)
    last = tl.maximum(count, 1) - 1
    _, rows, _ = slot_at(slots, first + last, T, NT, C, SIGN)
    return token, last * C + rows


@triton.jit
def slot_of(first, count, token0, rows_left, n, ADJOINT: tl.constexpr, C: tl.constexpr, SIGN: tl.constexpr):
    """(slot, token of its row 0, its rows) of the n-th turn of a walk, which goes back in time when ADJOINT."""
    i = n
    if ADJOINT:
        i = count - 1 - n
    return first + i, token0 + i * (C * SIGN), tl.minimum(rows_left - i * C, C)


@triton.jit
def walked_last(place, total, ADJOINT: tl.constexpr):
    """Whether the sequence's walk ends with the segment at this place, so that no other starts from its end."""
    last = place == total - 1
    if ADJOINT:
        last = place == 0
    return last


@triton.jit
def start_of(
    begin, ends, decay_a, decay_b, g, seq, place, total, head, a, b, ADJOINT: tl.constexpr, H: tl.constexpr, DA: tl.constexpr,
    DB: tl.constexpr, STRIDE_A: tl.constexpr, STRIDE_B: tl.constexpr, BA: tl.constexpr, BB: tl.constexpr, ALIKE: tl.constexpr,
):  # fmt: skip
    """[BA, BB]: the state at a segment's beginning, from the sequence's own and the ends of the segments walked before.

    ALIKE: 0, or how many decays an end has in decay_a where they are all the same: one of them is read then.
    """
    i = a + tl.arange(0, BA)
    j = b + tl.arange(0, BB)
    S = tl.zeros([BA, BB], tl.float32)
    if begin is not None:
        S += load_state(begin, seq.to(tl.int64) * H + head, a, b, DA, DB, STRIDE_A, STRIDE_B, BA, BB).to(tl.float32)
    if ends is not None:
        walked_before = place
        if ADJOINT:
            walked_before = total - 1 - place
        for n in range(walked_before):
            other = (g - place + n).to(tl.int64) * H + head
            if ADJOINT:
                other = (g - place + total - 1 - n).to(tl.int64) * H + head
            if ALIKE > 0:
                S = S * tl.load(decay_a + other * ALIKE)
            elif decay_a is not None:
                S = S * tl.load(decay_a + other * DA + i, mask=i < DA, other=0.0)[:, None]
            if decay_b is not None:
                S = S * tl.load(decay_b + other * DB + j, mask=j < DB, other=0.0)[None, :]
            S += load_state(ends, other, a, b, DA, DB, STRIDE_A, STRIDE_B, BA, BB)
    return S


@triton.jit
def walk(
    xa, xb, ga, gb, gs, gamma, begin, ends, end_decay_a, end_decay_b, slots, segments, scale, T, NT, NS, SC,
    states, final, decay_a, decay_b,
    H: tl.constexpr, HA: tl.constexpr, HB: tl.constexpr, HGA: tl.constexpr, HGB: tl.constexpr, HGS: tl.constexpr,
    DA: tl.constexpr, DB: tl.constexpr, BA: tl.constexpr, BB: tl.constexpr, C: tl.constexpr, SIGN: tl.constexpr,
    EVEN: tl.constexpr, ADJOINT: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr, PIECES: tl.constexpr, EXACT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Programs: tiles of a * tiles of b * segments * heads.

    states [slots, H, DA, DB] may be None; final is [N, H, DA, DB], or, with decay_a given (SEGMENT), each segment's own end.
    gs: g, or, where not EXACT and without gates per channel, its running sums.
    """
    TA: tl.constexpr = (DA + BA - 1) // BA
    TB: tl.constexpr = (DB + BB - 1) // BB
    SEGMENT: tl.constexpr = decay_a is not None
    SCALAR: tl.constexpr = (ga is None) and (gb is None) and ((gs is not None) or (gamma is not None))
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
    i = a + tl.arange(0, BA)
    j = b + tl.arange(0, BB)
    kept_a = tl.full([BA], 1.0, tl.float32)
    kept_b = tl.full([BB], 1.0, tl.float32)
    constant = constant_decay(gamma, seq, head, H)
    S = start_of(begin, ends, end_decay_a, end_decay_b, g, seq, place, total, head, a, b, ADJOINT, H, DA, DB, DB, 1, BA, BB, 0)
    token0, rows_left = rows_of(slots, first, count, T, NT, C, SIGN)
    for n in tl.range(count, num_stages=STAGES):
        s, token, rows = slot_of(first, count, token0, rows_left, n, ADJOINT, C, SIGN)
        index = s.to(tl.int64) * H + head
        if not SEGMENT:
            store_state(states, S, index, a, b, DA, DB, BA, BB)
        va = load_rows(xa, token, rows, head // (H // HA), a, HA, DA, C, BA, SIGN, EVEN)  # [C, BA]
        vb = load_rows(xb, token, rows, head // (H // HB), b, HB, DB, C, BB, SIGN, EVEN)  # [C, BB]
        if ga is not None:
            # Transposed, [BA, C]: what is computed is then the left, register operand of the product below.
            la = tl.trans(channel_log_decay(ga, gs, gamma, token, rows, seq, head, a, True, H, HGA, HGS, DA, C, BA, SIGN, EVEN))
            tot_a = tl.exp(tl.sum(la, 1))
            if ADJOINT:
                left = tl.trans(va).to(tl.float32) * (scale * tl.exp(sums_of_columns(la, onwards(C), PIECES)))
            else:
                left = tl.trans(va).to(tl.float32) * tl.exp(sums_of_columns(la, before(C), PIECES))
            S = S * tot_a[:, None]
            if SEGMENT:
                kept_a *= tot_a
        else:
            left = tl.trans(va.to(DT))
            if ADJOINT:
                vb = vb.to(tl.float32) * scale
        if gb is not None:
            lb = channel_log_decay(gb, gs, gamma, token, rows, seq, head, b, ga is None, H, HGB, HGS, DB, C, BB, SIGN, EVEN)
            tot_b = tl.exp(tl.sum(lb, 0))
            if ADJOINT:
                vb = vb.to(tl.float32) * tl.exp(sums(upto(C), lb, PIECES))
            else:
                vb = vb.to(tl.float32) * tl.exp(sums(after(C), lb, PIECES))
            S = S * tot_b[None, :]
            if SEGMENT:
                kept_b *= tot_b
        if SCALAR:
            _, pre, suf, tot = head_decays(gs, gamma, constant, index, token, rows, seq, head, H, HGS, C, SIGN, EXACT)
            factor = suf
            if ADJOINT:
                factor = pre
            vb = vb.to(tl.float32) * factor[:, None]
            S = S * tot
            if SEGMENT:
                kept_a *= tot
        S = dot(left, vb, S, DT, PREC)
    if SEGMENT:
        segment = g.to(tl.int64) * H + head
        store_state(final, S, segment, a, b, DA, DB, BA, BB)
        if b == 0:
            tl.store(decay_a + segment * DA + i, kept_a, mask=i < DA)
        if decay_b is not None:
            if a == 0:
                tl.store(decay_b + segment * DB + j, kept_b, mask=j < DB)
    else:
        if last:
            store_state(final, S, seq.to(tl.int64) * H + head, a, b, DA, DB, BA, BB)
