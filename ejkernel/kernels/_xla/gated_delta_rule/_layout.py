"""How the tokens of a call are cut into chunks of C rows, which a `lax.scan` takes one after the other.

Dense calls pad the last chunk with rows that change nothing (q = k = v = beta = 0, log decay 0) and cut it off again. Packed
sequences start a chunk each; their rows are gathered into chunks by a table, in the order of the recurrence, and gathered
back. Everything is a reshape or a gather with static shapes, so JAX can differentiate, map and partition it.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel._search import how_many_up_to

Array = jax.Array


class Place(NamedTuple):
    """Where chunks stand among packed sequences, each `[chunks]`."""

    sequence: Array
    first: Array  # whether the sequence begins here
    last: Array  # whether it ends here
    used: Array


class Table(NamedTuple):
    """Packed rows: where each comes from and where each token went."""

    token_of: Array  # [chunks, C]: T where there is none
    row_of: Array  # [T]: chunk * C + row; chunks * C where it is in none
    place: Place


@dataclasses.dataclass(frozen=True)
class Layout:
    """Chunks of `rows` tokens. Sizes may be symbolic in dense calls (`jax.export`)."""

    rows: int
    tokens: Any
    chunks: Any
    reverse: bool
    table: Table | None

    @classmethod
    def dense(cls, rows: int, tokens: Any, reverse: bool) -> Layout:
        return cls(rows, tokens, -(-tokens // rows), reverse, None)

    @classmethod
    def packed(cls, rows: int, tokens: int, reverse: bool, cu_seqlens: Array) -> Layout:
        """Sequence n has ceil(length / C) chunks, at most T // C + N in all."""
        sequences = cu_seqlens.shape[0] - 1
        chunks = tokens // rows + sequences
        starts, ends = cu_seqlens[:-1], cu_seqlens[1:]  # [N]
        chunks_of = (ends - starts + rows - 1) // rows
        chunk_end = jnp.cumsum(chunks_of, dtype=jnp.int32)
        chunk_start = chunk_end - chunks_of
        chunk = jnp.arange(chunks, dtype=jnp.int32)
        sequence = jnp.minimum(how_many_up_to(chunk_end, chunk), sequences - 1)
        index = chunk - chunk_start[sequence]  # which of its sequence's chunks this is
        used = chunk < chunk_end[-1]
        row = index[:, None] * rows + jnp.arange(rows, dtype=jnp.int32)[None]  # [chunks, C]: which row of its sequence
        low, high = starts[sequence][:, None], ends[sequence][:, None]
        token = high - 1 - row if reverse else low + row
        token_of = jnp.where(used[:, None] & (row < high - low), token, tokens)
        each = jnp.arange(tokens, dtype=jnp.int32)
        mine = jnp.minimum(how_many_up_to(ends, each), sequences - 1)
        row_of = chunk_start[mine] * rows + (ends[mine] - 1 - each if reverse else each - starts[mine])
        row_of = jnp.where(each < ends[-1], row_of, chunks * rows)  # what lies after the last sequence is in no row
        # An empty sequence at the end lends its place to chunks that nothing uses: its first one is its last, too, and hands on
        # the state, or its adjoint.
        place = Place(sequence, index == 0, index == jnp.maximum(chunks_of[sequence] - 1, 0), used)
        return cls(rows, tokens, chunks, reverse, Table(token_of, row_of, place))

    @property
    def place(self) -> Place | None:
        return None if self.table is None else self.table.place

    @property
    def flips(self) -> bool:
        """Whether chunks and their rows lie against the order of the recurrence. Packed ones are gathered in that order."""
        return self.reverse and self.table is None

    def split(self, x: Array) -> Array:
        """`[B, T, ...]` by chunks: `[B, chunks, C, ...]` without a copy, or gathered `[chunks, 1, C, ...]` when packed."""
        if self.table is not None:
            return jnp.take(x[0], self.table.token_of, axis=0, mode="fill", fill_value=0)[:, None]
        missing = self.chunks * self.rows - self.tokens
        if not (isinstance(missing, int) and missing == 0):
            x = jnp.pad(x, [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)])
        return x.reshape(x.shape[0], self.chunks, self.rows, *x.shape[2:])

    def chunk(self, x: Array, i: Array) -> Array:
        """Chunk i `[B, C, ...]` of what `split` gave."""
        return lax.dynamic_index_in_dim(x, i, 0 if self.table is not None else 1, keepdims=False)

    def shape(self, chunk: tuple[int, ...]) -> tuple[Any, ...]:
        """Of all chunks together, as `split` gives them, for the shape of one `[B, C, ...]`."""
        return (self.chunks, *chunk) if self.table is not None else (chunk[0], self.chunks, *chunk[1:])

    def placed(self, x: Array, chunk: Array, i: Array) -> Array:
        """`x` with its chunk i replaced."""
        return lax.dynamic_update_index_in_dim(x, chunk, i, 0 if self.table is not None else 1)

    def joined(self, x: Array) -> Array:
        """Rows by chunks, as `split` gives them, back to `[B, T, ...]`."""
        if self.table is not None:
            return jnp.take(x.reshape(-1, *x.shape[3:]), self.table.row_of, axis=0, mode="fill", fill_value=0)[None]
        return x.reshape(x.shape[0], self.chunks * self.rows, *x.shape[3:])[:, : self.tokens]

    def read(self, x: Array, heads: int, dtype: np.dtype) -> Array:
        """A chunk's rows `[B, C, h, ...]` as `[B, heads, C, ...]` in the order of the recurrence; h divides heads."""
        rows = jnp.swapaxes((x[:, ::-1] if self.flips else x).astype(dtype), 1, 2)
        return rows if rows.shape[1] == heads else jnp.repeat(rows, heads // rows.shape[1], axis=1)

    def write(self, x: Array, heads: int, dtype: np.dtype) -> Array:
        """`[B, H, C, ...]` as a chunk's rows `[B, C, heads, ...]`, summed over the heads of a group."""
        if x.shape[1] != heads:
            x = jnp.sum(x.reshape(x.shape[0], heads, x.shape[1] // heads, *x.shape[2:]), 2)
        rows = jnp.swapaxes(x, 1, 2).astype(dtype)
        return rows[:, ::-1] if self.flips else rows

    def by_token(self, x: Array, heads: int, dtype: np.dtype) -> Array:
        """A chunk's rows `[B, C, h, ...]` as `[C, B, heads, ...]` in the order of the recurrence; h divides heads."""
        rows = jnp.swapaxes(x, 0, 1).astype(dtype)
        rows = rows[::-1] if self.flips else rows
        return rows if rows.shape[2] == heads else jnp.repeat(rows, heads // rows.shape[2], axis=2)

    def from_tokens(self, x: Array, dtype: np.dtype) -> Array:
        """`[C, B, H, ...]` as a chunk's rows `[B, C, H, ...]`."""
        return jnp.swapaxes(x[::-1] if self.flips else x, 0, 1).astype(dtype)
