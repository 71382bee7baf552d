"""How a call is cut into chunks and segments (runs of chunks): static sizes, and tables for packed calls."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.callib import cdiv
from ejkernel.kernels._triton.linear._plan import Plan

Array = jax.Array
MULTIPROCESSORS = 132  # of an H100 or H200
PROGRAMS_TO_FILL = 2 * MULTIPROCESSORS  # fewer scanning programs leave it idle
ENOUGH_PROGRAMS = 120  # nearly one for each: what a second would win is less than the first pass over half of the rows costs
MAX_SEGMENTS = 32
MAX_TOGETHER = 8
LENGTH_CLASSES = 16  # of packed segments, which are started in order of them


@dataclasses.dataclass(frozen=True)
class Chunks:
    """A call's chunks. Dense: chunk s is chunk s % per_sequence of sequence s // per_sequence, with no table."""

    plan: Plan
    tokens: int  # T
    count: int
    per_sequence: int  # dense; the table's width when packed
    even: bool  # every chunk is full
    table: Array | None  # [3, count]: token of row 0, rows, sequence
    first: Array | None  # packed, [N + 1]: the first chunk of every sequence

    @classmethod
    def of(cls, plan: Plan, B: int, T: int, cu_seqlens: Array | None) -> Chunks:
        count, per = chunk_counts(plan, B, T, None if cu_seqlens is None else cu_seqlens.shape[0] - 1)
        if cu_seqlens is None:
            return cls(plan, T, count, per, T % plan.C == 0, None, None)
        chunks_of = -(-jnp.diff(cu_seqlens) // plan.C)  # [N]
        first = starts(chunks_of, plan.compare_all)
        index = jnp.arange(count, dtype=jnp.int32)
        seq = owner(first, index, plan.compare_all)
        place = (index - first[seq]) * plan.C
        low, high = cu_seqlens[seq], cu_seqlens[seq + 1]
        token = high - 1 - place if plan.reverse else low + place
        rows = jnp.where(index < first[-1], jnp.minimum(high - low - place, plan.C), 0)
        return cls(plan, T, count, count, False, jnp.stack([token, rows, seq]).astype(jnp.int32), first)

    @property
    def arguments(self) -> dict[str, Any]:
        """What tells a kernel where its chunks lie."""
        return {"chunks": self.table, "T": self.tokens, "NT": self.per_sequence}

    def together(self, programs: int) -> int:
        """How many chunks a program looks at that skips the weakly gated ones: more are fewer programs to start in vain.

        programs: how many share a chunk.
        """
        most = self.count * programs // (4 * PROGRAMS_TO_FILL)
        return 1 << max(0, min(most, MAX_TOGETHER).bit_length() - 1)


@dataclasses.dataclass(frozen=True)
class Segments:
    """Runs of `length` chunks of one sequence, each scanned by its own programs."""

    length: int
    count: int
    per_sequence: int  # dense; the table's width when packed
    table: Array | None  # [6, count]: see `packed`

    @property
    def split(self) -> bool:
        """Whether a sequence may have several segments."""
        return self.table is not None or self.per_sequence > 1

    @classmethod
    def of(cls, cut: Chunks, sequences: int, programs: int) -> Segments:
        """Args: programs: how many programs scan one segment of every sequence."""
        packed = cut.table is not None
        length = cut.plan.segment
        if length is None:
            length = segment_length(cut.plan, cut.count, cut.per_sequence, sequences, programs, packed=packed)
        return cls.packed(cut, sequences, length) if packed else cls.dense(cut, sequences, length)

    @classmethod
    def dense(cls, cut: Chunks, sequences: int, length: int) -> Segments:
        per = cdiv(cut.per_sequence, length)
        return cls(length, sequences * per, per, None)

    @classmethod
    def packed(cls, cut: Chunks, N: int, length: int) -> Segments:
        """With a column for every segment in the order in which they are started, the longest first, so that what the device
        ends with is short: segment (its place among `ends`), first chunk, chunks, sequence (-1: unused), place in the sequence,
        the sequence's segments."""
        assert cut.first is not None
        count = cut.count // length + N
        chunks_of = jnp.diff(cut.first)  # [N]
        full, left = chunks_of // length, chunks_of % length
        shorter = (left > 0) | (chunks_of == 0)  # an empty sequence still hands its state on
        length_class = (length - 1 - left) * LENGTH_CLASSES // length  # of the shorter segment, 0 for nearly full ones
        each_class = jnp.arange(LENGTH_CLASSES, dtype=jnp.int32)[:, None]
        in_class = shorter[None] & (length_class[None] == each_class)  # [LENGTH_CLASSES, N]
        first = starts(jnp.concatenate([full, in_class.astype(jnp.int32).ravel()]), cut.plan.compare_all)
        index = jnp.arange(count, dtype=jnp.int32)
        group = owner(first, index, cut.plan.compare_all)
        seq, is_full = group % N, group < N
        place = jnp.where(is_full, index - first[group], full[seq])
        begin = cut.first[seq]
        table = [
            begin // length + seq + place,  # no two alike, a sequence's one after the other, below `count`
            begin + place * length,
            jnp.where(is_full, length, left[seq]),
            jnp.where(index < first[-1], seq, -1),
            place,
            full[seq] + shorter[seq].astype(jnp.int32),
        ]
        return cls(length, count, count, jnp.stack(table).astype(jnp.int32))

    @property
    def arguments(self) -> dict[str, Any]:
        """What tells a kernel where its segment lies."""
        return {"segments": self.table, "NS": self.per_sequence, "SC": self.length}


def chunk_counts(plan: Plan, B: int, T: int, packed: int | None) -> tuple[int, int]:
    """(all chunks, those of a sequence; packed all as well); packed: how many sequences, or None."""
    if packed is None:
        per = cdiv(T, plan.C)
        return B * per, per
    count = T // plan.C + packed
    return count, count


def segment_length(plan: Plan, count: int, per_sequence: int, sequences: int, programs: int, *, packed: bool) -> int:
    """Chunks of a segment of so many in all and per sequence; programs: how many scan one segment of every sequence."""
    if not packed:
        return length_to_fill(per_sequence, programs, plan.min_segment)
    # Packed lengths are not known here. One sequence may hold nearly all chunks, so segments are sized by the total.
    across = max(1, programs // sequences)
    # Uneven lengths leave programs idle at the end, so there are twice as many as fill the device.
    wanted = min(cdiv(2 * PROGRAMS_TO_FILL, across), MAX_SEGMENTS)
    return max(plan.min_segment, cdiv(count, wanted))


def length_to_fill(chunks: int, programs: int, least: int) -> int:
    """Chunks per segment of sequences of so many, so that the device is filled.

    Args:
        programs: how many programs scan one segment of every sequence.
        least: the shortest segment's.
    """
    wanted = max(1, min(PROGRAMS_TO_FILL // max(programs, 1), MAX_SEGMENTS, chunks // least))
    return cdiv(chunks, 1 if programs >= ENOUGH_PROGRAMS else wanted)


def starts(counts: Array, compare_all: int) -> Array:
    """[n + 1]: the sum of the counts [n] before each, and of all."""
    if counts.size**2 > compare_all:
        return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    before = jnp.arange(counts.size)[None] < jnp.arange(counts.size + 1)[:, None]
    return jnp.sum(jnp.where(before, counts[None], 0), 1, dtype=jnp.int32)


def owner(first: Array, index: Array, compare_all: int) -> Array:
    """The sequence i with first[i] <= index < first[i + 1], the last one for an index beyond all; first [N + 1]."""
    method = "compare_all" if first.size * index.size <= compare_all else "scan"
    found = jnp.searchsorted(first, index, side="right", method=method) - 1
    return jnp.minimum(found, first.size - 2).astype(jnp.int32)
