"""How a call is cut into chunks and segments (runs of chunks): static sizes, and tables for packed calls."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.callib import cdiv, triton_call
from ejkernel.kernels._triton.linear._plan import Plan, tile
from ejkernel.kernels._triton.linear.kernels.packed_tables import packed_tables

Array = jax.Array
MULTIPROCESSORS = 132  # of an H100 or H200
PROGRAMS_TO_FILL = 2 * MULTIPROCESSORS  # fewer scanning programs leave it idle
ENOUGH_PROGRAMS = 120  # nearly one for each: segments would win less than the first pass for their ends costs
MAX_SEGMENTS = 32
MAX_TOGETHER = 8
COLUMNS = 32  # of a packed call's tables, for each program that makes them


class Tables:
    """The tables of a packed call, each made where it is first asked for: that of the chunks with that of the segments, in one
    launch, unless it comes first."""

    def __init__(self, plan: Plan, count: int, offsets: Array):
        self._plan, self._count, self._offsets = plan, count, offsets
        self._chunks: Array | None = None
        self._segments: dict[int, Array] = {}

    @property
    def sequences(self) -> int:
        return self._offsets.shape[0] - 1

    @property
    def chunks(self) -> Array:
        """[3, chunks]: token of row 0, rows, sequence."""
        if self._chunks is None:
            self._chunks = self._made(1)["chunks"]
        return self._chunks

    def segments(self, length: int) -> Array:
        """[6, segments]: see `packed_tables`."""
        if length not in self._segments:
            made = self._made(length, chunks=self._chunks is None, segments=True)
            self._segments[length] = made["segments"]
            self._chunks = made.get("chunks", self._chunks)
        return self._segments[length]

    def _made(self, length: int, *, chunks: bool = True, segments: bool = False) -> dict[str, Array]:
        N, NT = self.sequences, self._count
        NS = NT // length + N
        table = lambda rows, columns: jax.ShapeDtypeStruct((rows, columns), np.int32)
        return triton_call(
            arguments={"offsets": self._offsets, "N": N, "NT": NT, "NS": NS, "SC": length},
            out_shape={"chunks": table(3, NT) if chunks else None, "segments": table(6, NS) if segments else None},
            kernel=packed_tables, grid=(chunks * cdiv(NT, COLUMNS) + segments * cdiv(NS, COLUMNS),), C=self._plan.C, B=COLUMNS,
            BN=tile(N, 64), SIGN=self._plan.sign, num_warps=4, num_stages=1,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Chunks:
    """A call's chunks. Dense: chunk s is chunk s % per_sequence of sequence s // per_sequence, with no table."""

    plan: Plan
    tokens: int  # T
    count: int
    per_sequence: int  # dense; the table's width when packed
    even: bool  # every chunk is full
    tables: Tables | None = None  # of a packed call

    @classmethod
    def of(cls, plan: Plan, B: int, T: int, cu_seqlens: Array | None) -> Chunks:
        count, per = chunk_counts(plan, B, T, None if cu_seqlens is None else cu_seqlens.shape[0] - 1)
        tables = None if cu_seqlens is None else Tables(plan, count, cu_seqlens)
        return cls(plan, T, count, per, tables is None and T % plan.C == 0, tables)

    @property
    def table(self) -> Array | None:
        """Packed: [3, count]."""
        return None if self.tables is None else self.tables.chunks

    @property
    def arguments(self) -> dict[str, Any]:
        """What tells a kernel where its chunks lie."""
        return {"chunks": self.table, "T": self.tokens, "NT": self.per_sequence}

    def together(self, programs: int) -> int:
        """How many chunks one program takes where it skips the weakly gated ones: the more, the fewer programs start in vain.

        Args:
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
    table: Array | None  # packed: [6, count]

    @property
    def split(self) -> bool:
        """Whether a sequence may have several segments."""
        return self.table is not None or self.per_sequence > 1

    @classmethod
    def of(cls, cut: Chunks, sequences: int, programs: int) -> Segments:
        """Args: programs: how many programs scan one segment of every sequence."""
        packed = cut.tables is not None
        length = cut.plan.segment
        if length is None:
            length = segment_length(cut.plan, cut.count, cut.per_sequence, sequences, programs, packed=packed)
        return cls.packed(cut, length) if packed else cls.dense(cut, sequences, length)

    @classmethod
    def dense(cls, cut: Chunks, sequences: int, length: int) -> Segments:
        per = cdiv(cut.per_sequence, length)
        return cls(length, sequences * per, per, None)

    @classmethod
    def packed(cls, cut: Chunks, length: int) -> Segments:
        assert cut.tables is not None
        table = cut.tables.segments(length)
        return cls(length, table.shape[1], table.shape[1], table)

    @property
    def arguments(self) -> dict[str, Any]:
        """What tells a kernel where its segment lies."""
        return {"segments": self.table, "NS": self.per_sequence, "SC": self.length}


def chunk_counts(plan: Plan, B: int, T: int, packed: int | None) -> tuple[int, int]:
    """(chunks in all, chunks of a sequence). Of a packed call, in which sequences differ, both are the first.

    Args:
        packed: how many sequences are packed; None in a dense call.
    """
    if packed is None:
        per = cdiv(T, plan.C)
        return B * per, per
    count = T // plan.C + packed
    return count, count


def segment_length(plan: Plan, count: int, per_sequence: int, sequences: int, programs: int, *, packed: bool) -> int:
    """Chunks of a segment.

    Args:
        count, per_sequence: the call's chunks, as `chunk_counts` gives them.
        programs: how many scan one segment of every sequence.
    """
    if not packed:
        return length_to_fill(per_sequence, programs, plan.min_segment)
    # Packed lengths are not known here. One sequence may hold nearly all chunks, so segments are sized by the total.
    across = max(1, programs // sequences)
    # Uneven lengths leave programs idle at the end, so there are twice as many as fill the device.
    wanted = min(max(1, 2 * PROGRAMS_TO_FILL // across), MAX_SEGMENTS)
    return max(plan.min_segment, cdiv(count, wanted))


def length_to_fill(chunks: int, programs: int, least: int) -> int:
    """Chunks per segment, so that the device is filled.

    Args:
        chunks: those of a sequence.
        programs: how many programs scan one segment of every sequence.
        least: the shortest segment's.
    """
    wanted = max(1, min(PROGRAMS_TO_FILL // max(programs, 1), MAX_SEGMENTS, chunks // least))
    return cdiv(chunks, 1 if programs >= ENOUGH_PROGRAMS else wanted)


def owner(first: Array, index: Array, compare_all: int) -> Array:
    """The sequence i with first[i] <= index < first[i + 1], the last one for an index beyond all; first [N + 1]."""
    method = "compare_all" if first.size * index.size <= compare_all else "scan"
    found = jnp.searchsorted(first, index, side="right", method=method) - 1
    return jnp.minimum(found, first.size - 2).astype(jnp.int32)
