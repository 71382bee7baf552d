"""Where the runs of a call lie in time, and how their rows are read from and written to `[B, T, H, D]` arrays.

A run is R rows of one sequence, one or several chunks, which the loop takes at once. Runs are taken in the order of the
recurrence. One that its sequence does not fill reads rows of its neighbours and masks them to steps that change nothing
(q = k = v = 0, log decay 0), and writes its own rows only. Slices and writes happen inside the loop, so no array is copied.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel._search import how_many_up_to
from ejkernel._sizes import as_value, known
from ejkernel._varying import constant

Array = jax.Array


def _at_least(tokens: Any, rows: int) -> Any:
    """The larger of two sizes; of a size that is not known, the next multiple of the other."""
    return max(tokens, rows) if known(tokens) else -(-tokens // rows) * rows


class InSequence(NamedTuple):
    """Where a run stands among packed sequences."""

    sequence: Array
    first: Array  # whether the sequence begins here
    last: Array  # whether it ends here


class Run(NamedTuple):
    """R rows. They are in the order of the recurrence: from the last token backwards when it is reversed."""

    start: Array  # first token that is read
    mine: Array | None  # [R] which rows belong to the run; None: all
    packed: InSequence | None  # None: one sequence in each row of the batch
    span: tuple[Array, Array]  # tokens [from, to) of the run


def take(x: Array, start: Array | int, count: int, axis: int = 1) -> Array:
    """`count` entries of an axis from a start that is never negative (saying so spares XLA a wrap-around per slice)."""
    sizes = list(x.shape)
    sizes[axis] = count
    return lax.dynamic_slice(x, _starts(x, start, axis), sizes, allow_negative_indices=False)


def put(x: Array, update: Array, start: Array | int, axis: int = 1) -> Array:
    """`x` with `update` written from `start` on along an axis."""
    return lax.dynamic_update_slice(x, update, _starts(x, start, axis), allow_negative_indices=False)


def _starts(x: Array, start: Array | int, axis: int) -> list[Any]:
    """Indices in 32 bits, whatever width Python's integers have in JAX."""
    starts: list[Any] = [np.int32(0)] * x.ndim
    starts[axis] = lax.convert_element_type(start, np.int32)
    return starts


@dataclasses.dataclass(frozen=True)
class Runs:
    """The runs of a call: `count` of them are used, `capacity` bounds the count when it is traced."""

    rows: int  # R
    length: int  # T: the tokens there are
    tokens: int  # the tokens the arrays have: at least R
    reverse: bool
    capacity: int
    count: Array | int
    ragged: bool  # whether some run may not be full
    table: tuple[Array, Array, Array, Array, Array] | None  # packed, each [capacity]: from, to, sequence, first, last

    @classmethod
    def dense(cls, rows: int, tokens: int, reverse: bool) -> Runs:
        """One sequence in each row of the batch."""
        count = -(-tokens // rows)
        ragged = not known(tokens) or tokens % rows != 0
        return cls(rows, tokens, _at_least(tokens, rows), reverse, count, as_value(count), ragged, None)

    @classmethod
    def packed(cls, rows: int, tokens: int, reverse: bool, cu_seqlens: Array) -> Runs:
        """Sequences end to end in one row: sequence n has ceil(length / R) runs, at most T // R + N in all."""
        sequences = cu_seqlens.shape[0] - 1
        capacity = tokens // rows + sequences
        runs_of = -(-jnp.diff(cu_seqlens) // rows)  # [N]
        ends = jnp.cumsum(runs_of)  # [N]
        index = jnp.arange(capacity, dtype=jnp.int32)
        sequence = jnp.minimum(how_many_up_to(ends, index), sequences - 1)
        place = index - (ends - runs_of)[sequence]  # which of its sequence's runs this is
        lower, upper = cu_seqlens[sequence], cu_seqlens[sequence + 1]
        if reverse:
            high = upper - place * rows
            low = jnp.maximum(high - rows, lower)
        else:
            low = lower + place * rows
            high = jnp.minimum(low + rows, upper)
        table = (low, high, sequence, place == 0, place == runs_of[sequence] - 1)
        return cls(rows, tokens, _at_least(tokens, rows), reverse, capacity, ends[-1].astype(jnp.int32), True, table)

    def at(self, i: Array) -> Run:
        packed: InSequence | None = None
        if self.table is not None:
            low, high, *place = (take(x, i, 1, axis=0)[0] for x in self.table)
            packed = InSequence(*place)
        else:
            length = as_value(self.length)
            begin, end = i * self.rows, jnp.minimum((i + 1) * self.rows, length)
            low, high = (length - end, length - begin) if self.reverse else (begin, end)
        start = jnp.clip(low, 0, as_value(self.tokens - self.rows)) if self.ragged else low
        mine = None
        if self.ragged:
            token = start + constant(np.arange(self.rows, dtype=np.int32))
            mine = (token >= low) & (token < high)
            mine = mine[::-1] if self.reverse else mine
        return Run(start, mine, packed, (low, high))

    def padded(self, x: Array) -> Array:
        """`x [B, T, ...]` with zero rows after the last token when there are fewer than one run's."""
        missing = self.tokens - x.shape[1]
        return x if missing == 0 else jnp.pad(x, [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)])

    def read(self, x: Array, run: Run, heads: int, dtype: np.dtype) -> Array:
        """The run's rows of `x [B, T, h, ...]` as `[B, heads, R, ...]`; h divides heads; foreign rows are 0."""
        rows = take(x, run.start, self.rows).astype(dtype)
        rows = rows[:, ::-1] if self.reverse else rows
        if run.mine is not None:
            rows = jnp.where(run.mine.reshape(1, -1, *[1] * (x.ndim - 2)), rows, 0)
        rows = jnp.swapaxes(rows, 1, 2)  # [B, h, R, ...]
        return rows if rows.shape[1] == heads else jnp.repeat(rows, heads // rows.shape[1], axis=1)

    def write(self, x: Array, run: Run, rows: Array) -> Array:
        """`x [B, T, h, ...]` with the run's rows set from `[B, heads, R, ...]`, summed over the heads of a group."""
        group = rows.shape[1] // x.shape[2]
        if group > 1:
            rows = rows.reshape(rows.shape[0], x.shape[2], group, *rows.shape[2:]).sum(2)
        rows = jnp.swapaxes(rows, 1, 2).astype(x.dtype)  # [B, R, h, ...]
        mine = run.mine
        if self.reverse:
            rows, mine = rows[:, ::-1], None if mine is None else mine[::-1]
        if mine is not None:
            old = take(x, run.start, self.rows)
            rows = jnp.where(mine.reshape(1, -1, *[1] * (x.ndim - 2)), rows, old)
        return put(x, rows, run.start)
