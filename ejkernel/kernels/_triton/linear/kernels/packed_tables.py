"""Where the chunks and segments of packed sequences lie, from their offsets, in one launch.

A sequence of n tokens has ceil(n / C) chunks, and these are cut into segments of SC: as many full ones as there are, and a
shorter one of what is left (of no chunks, where the sequence is empty: it still hands its state on). Segments are started in
order of length, so that what the device ends with is short: the full ones, then the shorter ones by `_length_class`.

Every program reads all offsets, BN sequences at a time, and sums up what lies before its own columns. So nothing waits for
another program, at the price of as many comparisons as there are columns times sequences.
"""

from __future__ import annotations

import triton
import triton.language as tl

LENGTH_CLASSES = tl.constexpr(16)  # of the shorter segments


@triton.jit
def _chunks_of(offsets, j, here, C: tl.constexpr):
    """Chunks of each sequence j; 0 where it is not `here`."""
    low = tl.load(offsets + j, mask=here, other=0).to(tl.int32)
    high = tl.load(offsets + j + 1, mask=here, other=0).to(tl.int32)
    return (high - low + (C - 1)) // C


@triton.jit
def _shorter_segment(chunks, SC):
    """(whether a sequence of so many chunks has a segment that is not full, its chunks)."""
    left = chunks % SC
    return (left > 0) | (chunks == 0), left


@triton.jit
def _length_class(left, SC):
    """0 for nearly full segments."""
    return (SC - 1 - left) * LENGTH_CLASSES // SC


@triton.jit
def _sum(which, counts):
    """[B]: the sum of counts [BN] over those of `which` [B, BN]."""
    return tl.sum(tl.where(which, counts[None, :], 0), 1)


@triton.jit
def _store_chunks(offsets, chunks, column, N, NT, C: tl.constexpr, B: tl.constexpr, BN: tl.constexpr, SIGN: tl.constexpr):
    s = column + tl.arange(0, B)
    seq = tl.zeros([B], tl.int32)
    first = tl.zeros([B], tl.int32)  # chunk of the sequence
    all_chunks = 0
    for n in range(0, N, BN):
        j = n + tl.arange(0, BN)
        count = _chunks_of(offsets, j, j < N, C)
        end = all_chunks + tl.cumsum(count, 0)
        before = (end[None, :] <= s[:, None]) & (j[None, :] < N - 1)  # what lies after all is the last sequence's
        seq += tl.sum(before.to(tl.int32), 1)
        first += _sum(before, count)
        all_chunks += tl.sum(count, 0)
    low = tl.load(offsets + seq).to(tl.int32)
    high = tl.load(offsets + seq + 1).to(tl.int32)
    place = (s - first) * C
    if SIGN == 1:
        token = low + place
    else:
        token = high - 1 - place
    here = s < NT
    tl.store(chunks + s, token, mask=here)
    tl.store(chunks + NT + s, tl.where(s < all_chunks, tl.minimum(high - low - place, C), 0), mask=here)
    tl.store(chunks + 2 * NT + s, seq, mask=here)


@triton.jit
def _store_segments(offsets, segments, column, N, NS, SC, C: tl.constexpr, B: tl.constexpr, BN: tl.constexpr):
    """Segments by their place g among the ends, where sequence j's are from first[j] // SC + j on: no two alike."""
    g = column + tl.arange(0, B)
    seq = tl.zeros([B], tl.int32)
    first = tl.zeros([B], tl.int32)  # chunk of the sequence
    full_before = tl.zeros([B], tl.int32)  # segments of the sequences before
    shorter_before = tl.zeros([B], tl.int32)
    all_chunks = 0
    all_full = 0
    all_shorter = 0
    for n in range(0, N, BN):
        j = n + tl.arange(0, BN)
        count = _chunks_of(offsets, j, j < N, C)
        full = count // SC
        is_shorter, _left = _shorter_segment(count, SC)
        shorter = (is_shorter & (j < N)).to(tl.int32)
        end = (all_chunks + tl.cumsum(count, 0)) // SC + j + 1
        before = (end[None, :] <= g[:, None]) & (j[None, :] < N - 1)
        seq += tl.sum(before.to(tl.int32), 1)
        first += _sum(before, count)
        full_before += _sum(before, full)
        shorter_before += _sum(before, shorter)
        all_chunks += tl.sum(count, 0)
        all_full += tl.sum(full, 0)
        all_shorter += tl.sum(shorter, 0)
    place = g - (first // SC + seq)
    count = _chunks_of(offsets, seq, seq < N, C)
    full = count // SC
    is_shorter, left = _shorter_segment(count, SC)
    total = full + is_shorter.to(tl.int32)
    own_class = _length_class(left, SC)
    earlier = tl.zeros([B], tl.int32)  # shorter segments that are started before
    for n in range(0, N, BN):
        j = n + tl.arange(0, BN)
        others_shorter, others_left = _shorter_segment(_chunks_of(offsets, j, j < N, C), SC)
        others_class = _length_class(others_left, SC)[None, :]
        first_j = (others_class < own_class[:, None]) | ((others_class == own_class[:, None]) & (j[None, :] < seq[:, None]))
        earlier += _sum(first_j, (others_shorter & (j < N)).to(tl.int32))
    is_full = place < full
    used = place < total
    unused_before = g - full_before - shorter_before - total
    at = tl.where(used, all_full + earlier, all_full + all_shorter + unused_before)
    at = tl.where(is_full, full_before + place, at)
    here = g < NS
    tl.store(segments + at, g, mask=here)
    tl.store(segments + NS + at, tl.where(used, first + place * SC, 0), mask=here)
    tl.store(segments + 2 * NS + at, tl.where(is_full, SC, tl.where(used, left, 0)), mask=here)
    tl.store(segments + 3 * NS + at, tl.where(used, seq, -1), mask=here)
    tl.store(segments + 4 * NS + at, place, mask=here)
    tl.store(segments + 5 * NS + at, total, mask=here)


@triton.jit
def packed_tables(
    offsets, N, NT, NS, SC,
    chunks, segments,
    C: tl.constexpr, B: tl.constexpr, BN: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    """Programs: blocks of B columns of chunks, then of segments. offsets [N + 1].

    chunks [3, NT]: token of row 0, rows, sequence. segments [6, NS], in the order in which they are started: segment (its place
    among the ends), first chunk, chunks, sequence (-1: unused), place in the sequence, the sequence's segments. Either may be
    None.
    """
    block = tl.program_id(0)
    if chunks is not None:
        if block * B < NT:
            _store_chunks(offsets, chunks, block * B, N, NT, C, B, BN, SIGN)
        block -= (NT + B - 1) // B
    if segments is not None:
        if block >= 0:
            _store_segments(offsets, segments, block * B, N, NS, SC, C, B, BN)
