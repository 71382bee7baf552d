"""What every state scan begins with: which segment its program scans, from which state, over which rows.

A scan is the one part of the chunked form that is serial in time. A program scans one segment (a run of chunks of a sequence)
of one head, with a tile of the state in registers. When there are too few sequences and heads to fill the device, a first
launch scans every segment from zero and keeps only its end and its decay, and the second starts from their combination.

A segment is a tuple: (its place among the ends, first chunk, chunks, sequence, place in the sequence, the sequence's segments).
"""

from __future__ import annotations

import triton
import triton.language as tl

from ejkernel.kernels._triton.linear.kernels.tiles import chunk_at, load_state


@triton.jit
def _segment_at(segments, n, NT, NS, SC):
    """The n-th segment to be started. segments: table [6, NS] of packed calls, or None."""
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
def ends_sequence(segment, ADJOINT: tl.constexpr):
    """Whether the sequence's scan ends with this segment, so that no other starts from its end; ADJOINT goes back in time."""
    _g, _first, _count, _seq, place, total = segment
    last = place == total - 1
    if ADJOINT:
        last = place == 0
    return last


@triton.jit
def starts_sequence(segment, ADJOINT: tl.constexpr):
    """Whether the sequence's scan starts with this segment; ADJOINT goes back in time."""
    return ends_sequence(segment, not ADJOINT)


@triton.jit
def scanned_segment(segments, unit, NT, NS, SC, ADJOINT: tl.constexpr, ENDS_ONLY: tl.constexpr):
    """(segment, whether its program is idle) of the given one in the order in which they are started.

    Idle: a column of the table that no sequence uses, or, with ENDS_ONLY, a segment from whose end no other starts.
    """
    segment = _segment_at(segments, unit, NT, NS, SC)
    idle = segment[3] < 0
    if ENDS_ONLY:
        idle = idle | ends_sequence(segment, ADJOINT)
    return segment, idle


@triton.jit
def rows_of_segment(chunks, first, count, T, NT, C: tl.constexpr, SIGN: tl.constexpr):
    """(token of the first row, rows) of a segment: its chunks lie side by side, so a scan need not look up each of them."""
    token, _, _ = chunk_at(chunks, first, T, NT, C, SIGN)
    last = tl.maximum(count, 1) - 1
    _, rows, _ = chunk_at(chunks, first + last, T, NT, C, SIGN)
    return token, last * C + rows


@triton.jit
def chunk_in_turn(first, count, token0, rows_left, n, ADJOINT: tl.constexpr, C: tl.constexpr, SIGN: tl.constexpr):
    """(chunk, token of its row 0, its rows) of the n-th turn of a scan, which goes back in time when ADJOINT."""
    i = n
    if ADJOINT:
        i = count - 1 - n
    return first + i, token0 + i * (C * SIGN), tl.minimum(rows_left - i * C, C)


@triton.jit
def state_at_start(
    begin, ends, decay_a, decay_b, segment, head, a, b, ADJOINT: tl.constexpr, H: tl.constexpr, DA: tl.constexpr,
    DB: tl.constexpr, STRIDE_A: tl.constexpr, STRIDE_B: tl.constexpr, BA: tl.constexpr, BB: tl.constexpr, ALIKE: tl.constexpr,
):  # fmt: skip
    """[BA, BB]: the state at a segment's beginning, from the sequence's own and the ends of the segments scanned before.

    ALIKE: 0, or how many decays an end has in decay_a where they are all the same: one of them is read then.
    """
    g, _first, _count, seq, place, total = segment
    i = a + tl.arange(0, BA)
    j = b + tl.arange(0, BB)
    S = tl.zeros([BA, BB], tl.float32)
    if begin is not None:
        S += load_state(begin, seq.to(tl.int64) * H + head, a, b, DA, DB, STRIDE_A, STRIDE_B, BA, BB).to(tl.float32)
    if ends is not None:
        scanned_before = place
        if ADJOINT:
            scanned_before = total - 1 - place
        for n in range(scanned_before):
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
