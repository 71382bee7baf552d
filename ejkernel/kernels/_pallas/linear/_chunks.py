"""Where chunks lie in time: whole chunks of one sequence each, from the arrays as they come and back.

Dense rows are padded to whole chunks by steps that change nothing (q = k = v = 0, log decay 0). Packed sequences get chunks of
their own, T // C + N at most; which tokens those hold is data, so they are gathered. Reversed calls are read backwards here,
and the kernels know nothing of it.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = jax.Array
FIRST, LAST = 1, 2  # bits of a chunk's mark: its sequence begins here, ends here


@dataclasses.dataclass(frozen=True)
class Chunks:
    """The chunks of a call; those that packed sequences leave unused follow, as more of the last sequence."""

    rows: int
    tokens: int
    count: int  # S
    reverse: bool
    sequence: Array  # [B * S]: whose state goes through the chunk
    marks: Array  # [B * S]
    source: Array | None  # packed, [S * C]: the token of every row; T where there is none
    place: Array | None  # packed, [T]: the row of every token; S * C after the last sequence, where no row is

    @classmethod
    def of(cls, rows: int, batch: int, tokens: int, reverse: bool, cu_seqlens: Array | None) -> Chunks:
        if cu_seqlens is not None:
            return cls._packed(rows, tokens, reverse, cu_seqlens.astype(jnp.int32))
        count = -(-tokens // rows)
        # Made by the program: a partitioned call must not hold arrays of its own.
        index = lax.iota(jnp.int32, batch * count)
        place = lax.rem(index, np.int32(count))
        marks = _marks(place == 0, place == count - 1)
        return cls(rows, tokens, count, reverse, lax.div(index, np.int32(count)), marks, None, None)

    @classmethod
    def _packed(cls, rows: int, tokens: int, reverse: bool, cu_seqlens: Array) -> Chunks:
        sequences = cu_seqlens.shape[0] - 1
        count = tokens // rows + sequences
        owned = -(-jnp.diff(cu_seqlens) // rows)  # [N] chunks of each sequence
        ends = jnp.cumsum(owned, dtype=jnp.int32)
        begins = ends - owned
        used = jnp.max(jnp.where(owned > 0, jnp.arange(sequences, dtype=jnp.int32), 0))  # the last sequence that is not empty
        index = jnp.arange(count, dtype=jnp.int32)
        sequence = jnp.minimum(_owner(ends, index), used)  # [S]
        place = index - begins[sequence]
        marks = _marks(place == 0, place == owned[sequence] - 1)
        offset = (place[:, None] * rows + jnp.arange(rows, dtype=jnp.int32)[None]).reshape(-1)  # [S * C] within the sequence
        low, high = (jnp.repeat(x[sequence], rows) for x in (cu_seqlens[:-1], cu_seqlens[1:]))
        source = high - 1 - offset if reverse else low + offset
        source = jnp.where(offset < high - low, source, tokens)
        token = jnp.arange(tokens, dtype=jnp.int32)
        mine = _owner(cu_seqlens[1:], token)  # [T]
        within = cu_seqlens[mine + 1] - 1 - token if reverse else token - cu_seqlens[mine]
        row = jnp.where(token < cu_seqlens[-1], begins[mine] * rows + within, count * rows)
        return cls(rows, tokens, count, reverse, sequence, marks, source, row)

    def filled(self, x: Array) -> Array:
        """`[B, T, ...]` in chunks, `[B, S * C, ...]`; rows without a token are 0."""
        if self.source is not None:
            return jnp.take(x, self.source, axis=1, mode="fill", fill_value=0)
        x = jnp.flip(x, 1) if self.reverse else x
        missing = self.count * self.rows - self.tokens
        return jnp.pad(x, [(0, 0), (0, missing), *[(0, 0)] * (x.ndim - 2)]) if missing else x

    def taken(self, x: Array) -> Array:
        """`[B, S * C, ...]` as `[B, T, ...]`; tokens without a row get 0."""
        if self.place is not None:
            return jnp.take(x, self.place, axis=1, mode="fill", fill_value=0)
        x = x[:, : self.tokens]
        return jnp.flip(x, 1) if self.reverse else x


def _marks(first: Array, last: Array) -> Array:
    return FIRST * first.astype(jnp.int32) + LAST * last.astype(jnp.int32)


def _owner(ends: Array, index: Array) -> Array:
    """Which of consecutive ranges that end at `ends` an index lies in; empty ranges hold none."""
    found = jnp.searchsorted(ends, index, side="right").astype(jnp.int32)
    return jnp.minimum(found, ends.shape[0] - 1)
