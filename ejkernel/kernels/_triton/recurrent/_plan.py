"""How a call is cut into slots (chunks), segments (runs of chunks) and tiles: static sizes, and tables for packed calls."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.callib import cdiv
from ejkernel.kernels._linear import LinearConfig, LinearProblem

Array = jax.Array
MAX_CHANNELS = 512
PROGRAMS_TO_FILL = 264  # two for each of an H200's 132 multiprocessors: fewer walking programs leave it idle
ENOUGH_PROGRAMS = 120  # nearly one for each: what a second would win is less than the first pass over half of the rows costs
MIN_SEGMENT = 8  # chunks: shorter segments cost more in their combination than they save
MAX_SEGMENTS = 32
COMPARE_ALL = 1 << 22  # comparisons that one small kernel does faster than a search or running sum, which takes a dozen kernels
LENGTH_CLASSES = 16  # of packed segments, which are started in order of them


@dataclasses.dataclass(frozen=True)
class Plan:
    """What of a call is known when it is traced. Hashable: it is a static argument of the compiled functions."""

    schedule: str
    C: int  # rows of a slot
    scale: float
    reverse: bool
    operand: np.dtype  # of matrix products
    precision: str  # Triton's name of how float32 operands are multiplied
    output: np.dtype
    block_k: int | None
    block_d: int | None
    num_warps: int | None
    num_stages: int | None

    @classmethod
    def of(cls, problem: LinearProblem, cfg: LinearConfig) -> Plan:
        rows = max(16, min(cfg.block_q, 1 << (problem.shape[1] - 1).bit_length(), 128))
        operand, precision = _operands(problem)
        return cls(
            cfg.schedule, rows, problem.scale, problem.reverse, operand, precision, problem.output_dtype,
            cfg.block_k, cfg.block_d, cfg.num_warps, cfg.num_stages,
        )  # fmt: skip

    @property
    def sign(self) -> int:
        return -1 if self.reverse else 1

    @property
    def exact(self) -> bool:
        """Whether products are as good as float32's."""
        return self.operand == np.float32 and self.precision == "tf32x3"


def _operands(problem: LinearProblem) -> tuple[np.dtype, str]:
    """bfloat16 inputs are multiplied as such. float16 ones as tf32, which has float16's digits and float32's range (a state
    may pass 65504); float32 ones as three tf32 products, whose sum has float32's digits."""
    dtypes = {x.dtype.name for x in (problem.query, problem.key, problem.value)}
    if dtypes == {"bfloat16"}:
        return np.dtype(jnp.bfloat16), "tf32"
    return np.dtype(np.float32), "tf32x3" if "float32" in dtypes else "tf32"


@dataclasses.dataclass(frozen=True)
class Slots:
    """A call's chunks. Dense: slot s is chunk s % per_sequence of sequence s // per_sequence, with no table."""

    C: int
    tokens: int  # T
    count: int
    per_sequence: int  # dense; the table's width when packed
    even: bool  # every slot is full
    table: Array | None  # [3, count]: token of row 0, rows, sequence
    first: Array | None  # packed, [N + 1]: the first slot of every sequence

    @classmethod
    def of(cls, plan: Plan, B: int, T: int, cu_seqlens: Array | None) -> Slots:
        if cu_seqlens is None:
            per = cdiv(T, plan.C)
            return cls(plan.C, T, B * per, per, T % plan.C == 0, None, None)
        N = cu_seqlens.shape[0] - 1
        count = T // plan.C + N
        slots_of = -(-jnp.diff(cu_seqlens) // plan.C)  # [N]
        first = starts(slots_of)
        index = jnp.arange(count, dtype=jnp.int32)
        seq = owner(first, index)
        place = (index - first[seq]) * plan.C
        low, high = cu_seqlens[seq], cu_seqlens[seq + 1]
        token = high - 1 - place if plan.reverse else low + place
        rows = jnp.where(index < first[-1], jnp.minimum(high - low - place, plan.C), 0)
        return cls(plan.C, T, count, count, False, jnp.stack([token, rows, seq]).astype(jnp.int32), first)


@dataclasses.dataclass(frozen=True)
class Segments:
    """Runs of `chunks` slots of one sequence, each walked by its own programs."""

    chunks: int
    count: int
    per_sequence: int  # dense; the table's width when packed
    table: Array | None  # [6, count]: see `_packed`

    @property
    def split(self) -> bool:
        """Whether a sequence may have several segments."""
        return self.table is not None or self.per_sequence > 1

    @classmethod
    def of(cls, slots: Slots, sequences: int, programs: int) -> Segments:
        """Args: programs: how many programs walk one segment of every sequence."""
        if slots.table is None:
            wanted = max(1, min(PROGRAMS_TO_FILL // programs, MAX_SEGMENTS, slots.per_sequence // MIN_SEGMENT))
            if programs >= ENOUGH_PROGRAMS:
                wanted = 1
            chunks = cdiv(slots.per_sequence, wanted)
            per = cdiv(slots.per_sequence, chunks)
            return cls(chunks, sequences * per, per, None)
        # Packed lengths are not known here. One sequence may hold nearly all slots, so segments are sized by the total.
        across = max(1, programs // sequences)
        # Uneven lengths leave programs idle at the end, so there are twice as many as fill the device.
        wanted = min(cdiv(2 * PROGRAMS_TO_FILL, across), MAX_SEGMENTS)
        chunks = max(MIN_SEGMENT, cdiv(slots.count, wanted))
        return cls._packed(slots, sequences, chunks)

    @classmethod
    def _packed(cls, slots: Slots, N: int, chunks: int) -> Segments:
        """With a column for every segment in the order in which they are started, the longest first, so that what the device
        ends with is short: segment (its place among `ends`), first slot, slots, sequence (-1: unused), place in the sequence,
        the sequence's segments."""
        assert slots.first is not None
        count = slots.count // chunks + N
        slots_of = jnp.diff(slots.first)  # [N]
        full, rest = slots_of // chunks, slots_of % chunks
        shorter = (rest > 0) | (slots_of == 0)  # an empty sequence still hands its state on
        length_class = (chunks - 1 - rest) * LENGTH_CLASSES // chunks  # of the shorter segment, 0 for nearly full ones
        in_class = shorter & (length_class == jnp.arange(LENGTH_CLASSES)[:, None])  # [LENGTH_CLASSES, N]
        first = starts(jnp.concatenate([full, in_class.astype(jnp.int32).ravel()]))
        index = jnp.arange(count, dtype=jnp.int32)
        group = owner(first, index)
        seq, is_full = group % N, group < N
        place = jnp.where(is_full, index - first[group], full[seq])
        begin = slots.first[seq]
        table = [
            begin // chunks + seq + place,  # no two alike, a sequence's one after the other, below `count`
            begin + place * chunks,
            jnp.where(is_full, chunks, rest[seq]),
            jnp.where(index < first[-1], seq, -1),
            place,
            full[seq] + shorter[seq],
        ]
        return cls(chunks, count, count, jnp.stack(table).astype(jnp.int32))


def starts(counts: Array) -> Array:
    """[n + 1]: the sum of the counts [n] before each, and of all."""
    if counts.size**2 > COMPARE_ALL:
        return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    before = jnp.arange(counts.size) < jnp.arange(counts.size + 1)[:, None]
    return jnp.sum(jnp.where(before, counts, 0), 1, dtype=jnp.int32)


def owner(first: Array, index: Array) -> Array:
    """The sequence i with first[i] <= index < first[i + 1], the last one for an index beyond all; first [N + 1]."""
    method = "compare_all" if first.size * index.size <= COMPARE_ALL else "scan"
    found = jnp.searchsorted(first, index, side="right", method=method) - 1
    return jnp.minimum(found, first.size - 2).astype(jnp.int32)


def tile(channels: int, most: int) -> int:
    """The power of two from 16 to `most` that covers the channels, or `most` when none does."""
    return max(16, min(most, 1 << (channels - 1).bit_length()))


def gate_pieces(plan: Plan, *gates: Any) -> int:
    """bfloat16 pieces that hold a log decay: one for a lone bfloat16 gate, three for float32's digits, else two."""
    given = [x for x in gates if x is not None]
    if len(given) == 1 and given[0].dtype == jnp.bfloat16:
        return 1
    return 3 if plan.exact else 2
