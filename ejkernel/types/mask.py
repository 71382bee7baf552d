"""Who may attend to whom: `MaskInfo`, a boolean mask or segment ids with positions.

>>> info = MaskInfo.from_segments(jnp.array([[0, 0, 0, 1, 1, -1]])).apply_causal()
>>> info.visualize()
█ · · · · ·
█ █ · · · ·
█ █ █ · · ·
· · · █ · ·
· · · █ █ ·
· · · · · ·
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from ejkernel.types._segments import (
    mask_to_segment_ids,
    segment_ids_to_mask,
    segment_ids_to_qkv_masks,
    segment_positions,
)

__all__ = [
    "MaskInfo",
    "as_window",
    "mask_to_segment_ids",
    "segment_ids_to_mask",
    "segment_ids_to_qkv_masks",
    "segment_positions",
]


@dataclasses.dataclass(frozen=True, eq=False)
class MaskInfo:
    """A boolean mask, or segment ids; build it with a `from_` method.

    A field that was not given is None; `get_or_compute_` methods work it out. `attention_mask` decides when it is there;
    ids and positions beside it (left by `apply_causal` and its like) only say where a token stands. Positions, those
    given or else those that restart in each segment, are what `apply_causal`, `apply_sliding_window`, `apply_chunked`, and
    `causal` and `sliding_window` of the operation compare; a mask without ids or positions is compared by index.

    Attributes:
        attention_mask: `[B, 1|H, Q, K]`, True = attend.
        q_segment_ids: `[B, Q]`, the segment of each query; -1 is padding and attends to nothing.
        kv_segment_ids: `[B, K]`, the segment of each key.
        q_positions: `[B, Q]`, the position of each query in its segment.
        kv_positions: `[B, K]`, the position of each key in its segment.
    """

    attention_mask: Bool[Array, "B H Q K"] | None = None
    q_segment_ids: Int[Array, "B Q"] | None = None
    kv_segment_ids: Int[Array, "B K"] | None = None
    q_positions: Int[Array, "B Q"] | None = None
    kv_positions: Int[Array, "B K"] | None = None

    @classmethod
    def from_attention_mask(cls, mask: Bool[Array, " ..."]) -> MaskInfo:
        """From a mask, True = attend: `[B, 1|H, Q, K]`, `[B, Q, K]`, or key padding `[B, K]` (then Q = K)."""
        mask = jnp.asarray(mask)
        if mask.ndim not in (2, 3, 4):
            raise ValueError(f"mask must be [B, K], [B, Q, K] or [B, 1|H, Q, K]; got shape {list(mask.shape)}.")
        if mask.dtype != bool and not jnp.issubdtype(mask.dtype, jnp.integer):
            raise TypeError(f"mask must be bool (True = attend) or 0/1 integers; got {mask.dtype}. A float mask is a bias.")
        mask = mask.astype(bool)
        if mask.ndim == 2:
            batch, kv_len = mask.shape
            mask = jnp.broadcast_to(mask[:, None, None, :], (batch, 1, kv_len, kv_len))
        return cls(attention_mask=mask[:, None] if mask.ndim == 3 else mask)

    @classmethod
    def from_segments(
        cls,
        q_segment_ids: Int[Array, "B Q"],
        kv_segment_ids: Int[Array, "B K"] | None = None,
        q_positions: Int[Array, "B Q"] | None = None,
        kv_positions: Int[Array, "B K"] | None = None,
    ) -> MaskInfo:
        """From segment ids; keys without their own ids (and positions) have the queries'."""
        if kv_segment_ids is None:
            kv_segment_ids = q_segment_ids
            kv_positions = q_positions if kv_positions is None else kv_positions
        q_ids, kv_ids = _as_ids("q_segment_ids", q_segment_ids), _as_ids("kv_segment_ids", kv_segment_ids)
        if q_ids.shape[0] != kv_ids.shape[0]:
            raise ValueError(f"kv_segment_ids must have q_segment_ids' batch {q_ids.shape[0]}; got {kv_ids.shape[0]}.")
        return cls(
            q_segment_ids=q_ids,
            kv_segment_ids=kv_ids,
            q_positions=None if q_positions is None else _as_ids("q_positions", q_positions, q_ids.shape),
            kv_positions=None if kv_positions is None else _as_ids("kv_positions", kv_positions, kv_ids.shape),
        )

    @classmethod
    def from_cu_seqlens(cls, cu_seqlens: Int[Array, " N+1"], total: int | None = None) -> MaskInfo:
        """One row of packed sequences: sequence n is tokens `cu_seqlens[n]` to `cu_seqlens[n+1]`; the rest is padding.

        Args:
            total: the length of the row; None takes `cu_seqlens[-1]`, which must then be known while tracing.
        """
        cu_seqlens = jnp.asarray(cu_seqlens)
        if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 1 or not jnp.issubdtype(cu_seqlens.dtype, jnp.integer):
            raise ValueError(f"cu_seqlens must be integers [N+1]; got {cu_seqlens.dtype}{list(cu_seqlens.shape)}.")
        if total is None:
            if isinstance(cu_seqlens, jax.core.Tracer):
                raise ValueError("total must be given when cu_seqlens is traced: shapes cannot depend on its values.")
            total = int(cu_seqlens[-1])
        index = jnp.arange(total, dtype=jnp.int32)
        ids = jnp.searchsorted(cu_seqlens[1:], index, side="right").astype(jnp.int32)  # [total]
        inside = index < cu_seqlens[-1]
        starts = cu_seqlens[jnp.minimum(ids, cu_seqlens.shape[0] - 1)].astype(jnp.int32)
        return cls.from_segments(jnp.where(inside, ids, -1)[None], q_positions=jnp.where(inside, index - starts, 0)[None])

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """The mask's shape `(B, 1|H, Q, K)`."""
        if self.attention_mask is not None:
            batch, heads, q_len, kv_len = self.attention_mask.shape
            return batch, heads, q_len, kv_len
        q_ids, kv_ids = self._held_segment_ids()
        return q_ids.shape[0], 1, q_ids.shape[1], kv_ids.shape[1]

    @property
    def batch_size(self) -> int:
        """B."""
        return self.shape[0]

    @property
    def q_len(self) -> int:
        """How many queries there are in a row."""
        return self.shape[2]

    @property
    def kv_len(self) -> int:
        """How many keys there are in a row."""
        return self.shape[3]

    @property
    def is_self_attention(self) -> bool:
        """Whether there are as many queries as keys (known from shapes, so also while tracing)."""
        return self.q_len == self.kv_len

    @property
    def bias(self) -> Float[Array, "B H Q K"]:
        """The mask to add to logits: 0 where one attends, -inf elsewhere (float32)."""
        return jnp.where(self.get_or_compute_attention_mask(), 0.0, -jnp.inf).astype(jnp.float32)

    def get_or_compute_attention_mask(self) -> Bool[Array, "B H Q K"]:
        """The mask `[B, 1|H, Q, K]`: the one held, or the pairs in the same segment."""
        if self.attention_mask is not None:
            return self.attention_mask
        return segment_ids_to_mask(*self._held_segment_ids())

    def get_or_compute_segment_ids(self) -> tuple[Int[Array, "B Q"], Int[Array, "B K"]]:
        """The ids of queries and keys: those held, or the blocks of the mask (ValueError when it is not made of blocks)."""
        if self.q_segment_ids is not None and self.kv_segment_ids is not None:
            return self.q_segment_ids, self.kv_segment_ids
        return mask_to_segment_ids(self.get_or_compute_attention_mask())

    def get_or_compute_positions(self) -> tuple[Int[Array, "B Q"], Int[Array, "B K"]]:
        """The positions of queries and keys: those held, or counted from 0 in each segment (0 for padding)."""
        if self.q_positions is not None and self.kv_positions is not None:
            return self.q_positions, self.kv_positions
        q_ids, kv_ids = self.get_or_compute_segment_ids()
        q = segment_positions(q_ids) if self.q_positions is None else self.q_positions
        return q, segment_positions(kv_ids) if self.kv_positions is None else self.kv_positions

    def compared_positions(self) -> tuple[Int[Array, "B Q"], Int[Array, "B K"]]:
        """What causality and windows compare: positions where ids or positions are held, otherwise indices."""
        if self.q_segment_ids is not None:
            return self.get_or_compute_positions()
        batch, _, q_len, kv_len = self.shape
        index = [jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (batch, n)) for n in (q_len, kv_len)]
        return (
            index[0] if self.q_positions is None else self.q_positions,
            index[1] if self.kv_positions is None else self.kv_positions,
        )

    def apply_causal(self, offset: int | Int[Array, ""] = 0) -> MaskInfo:
        """Keeps keys at `k <= q + offset` (positions)."""
        q, k = self._position_planes(offset)
        return self._restricted(k <= q)

    def apply_sliding_window(self, window: int | tuple[int, int], offset: int | Int[Array, ""] = 0) -> MaskInfo:
        """Keeps keys at `q + offset - left <= k <= q + offset + right` (positions); an int w is `(w, w)`."""
        left, right = as_window("window", window)
        q, k = self._position_planes(offset)
        return self._restricted((k >= q - left) & (k <= q + right))

    def apply_chunked(self, chunk_size: int, offset: int | Int[Array, ""] = 0) -> MaskInfo:
        """Keeps keys in the query's chunk: `k // chunk_size == (q + offset) // chunk_size` (positions)."""
        if chunk_size < 1:
            raise ValueError(f"chunk_size must be at least 1; got {chunk_size}.")
        q, k = self._position_planes(offset)
        return self._restricted(k // chunk_size == q // chunk_size)

    def apply_token_type_ids(
        self,
        ids: Int[Array, "B L"] | tuple[Int[Array, "B Q"], Int[Array, "B K"]],
        combine: Literal["union", "intersection"] = "union",
    ) -> MaskInfo:
        """Lets tokens of one type see each other, or only each other.

        Args:
            ids: one array `[B, L]` for queries and keys alike, or a pair `([B, Q], [B, K])`.
            combine: "union" adds the pairs of equal nonzero type (0 is an ordinary token), never across segments and never
                with padding where ids of segments are held; "intersection" keeps only the pairs of equal type.
        """
        q, kv = ids if isinstance(ids, tuple) else (ids, ids)
        batch, _, q_len, kv_len = self.shape
        q = _as_ids("ids", q, (batch, q_len))[:, None, :, None]  # [B, 1, Q, 1]
        kv = _as_ids("ids", kv, (batch, kv_len))[:, None, None, :]  # [B, 1, 1, K]
        if combine == "intersection":
            return self._restricted(q == kv)
        if combine != "union":
            raise ValueError(f"combine must be 'union' or 'intersection'; got {combine!r}.")
        added = (q == kv) & (q != 0)
        if self.q_segment_ids is not None:
            added &= segment_ids_to_mask(*self._held_segment_ids())
        return self.replace(attention_mask=self.get_or_compute_attention_mask() | added)

    def apply_kv_lengths(self, lengths: Int[Array, " B"]) -> MaskInfo:
        """Keeps the first `lengths[b]` keys of row b (by index): the filled part of a cache."""
        lengths = jnp.asarray(lengths)
        if lengths.shape != (self.batch_size,):
            raise ValueError(f"lengths must be [{self.batch_size}] (one per row); got shape {list(lengths.shape)}.")
        filled = jnp.arange(self.kv_len) < lengths[:, None]  # [B, K]
        if self.attention_mask is not None:
            return self._restricted(filled[:, None, None, :])
        return self.replace(kv_segment_ids=jnp.where(filled, self._held_segment_ids()[1], -1))

    def replace(self, **fields: Any) -> MaskInfo:
        """A copy with other fields: `info.replace(q_positions=...)`."""
        return dataclasses.replace(self, **fields)

    def __and__(self, other: MaskInfo) -> MaskInfo:
        return self._restricted(other.get_or_compute_attention_mask())

    def __or__(self, other: MaskInfo) -> MaskInfo:
        return self._redrawn(self.get_or_compute_attention_mask() | other.get_or_compute_attention_mask())

    def __invert__(self) -> MaskInfo:
        return self._redrawn(~self.get_or_compute_attention_mask())

    def visualize(self, batch: int = 0, head: int = 0, limit: int = 64) -> None:
        """Prints one row's mask, a line per query: `█` attends, `·` does not.

        Args:
            limit: at most this many characters each way; a longer mask is drawn in square cells, `▒` where only some attend.
        """
        if limit < 1:
            raise ValueError(f"limit must be at least 1; got {limit}.")
        plane = np.asarray(self.get_or_compute_attention_mask())[batch, head]
        cell = max(1, -(-max(plane.shape) // limit))
        for top in range(0, plane.shape[0], cell):
            cells = [plane[top : top + cell, left : left + cell] for left in range(0, plane.shape[1], cell)]
            print(" ".join("█" if c.all() else "▒" if c.any() else "·" for c in cells))

    def _held_segment_ids(self) -> tuple[Int[Array, "B Q"], Int[Array, "B K"]]:
        if self.q_segment_ids is None or self.kv_segment_ids is None:
            raise ValueError(
                "this MaskInfo has neither attention_mask nor both q_segment_ids and kv_segment_ids; build it with "
                "from_attention_mask, from_segments or from_cu_seqlens."
            )
        return self.q_segment_ids, self.kv_segment_ids

    def _position_planes(self, offset: int | Int[Array, ""]) -> tuple[Int[Array, "B 1 Q 1"], Int[Array, "B 1 1 K"]]:
        q, k = self.compared_positions()
        return q[:, None, :, None] + offset, k[:, None, None, :]

    def _restricted(self, keep: Bool[Array, "B H Q K"]) -> MaskInfo:
        return self.replace(attention_mask=self.get_or_compute_attention_mask() & keep)

    def _redrawn(self, mask: Bool[Array, "B H Q K"]) -> MaskInfo:
        """Another mask over the same tokens: their positions stay, their segments no longer say anything about it."""
        return self.replace(attention_mask=mask, q_segment_ids=None, kv_segment_ids=None)


jax.tree_util.register_dataclass(MaskInfo, data_fields=[field.name for field in dataclasses.fields(MaskInfo)], meta_fields=[])


def as_window(argument: str, window: int | tuple[int, int]) -> tuple[int, int]:
    """`(left, right)` from an int w, which is `(w, w)`, or a pair; TypeError or ValueError naming `argument`."""
    pair = tuple(window) if isinstance(window, (tuple, list)) else (window, window)
    if len(pair) != 2 or not all(isinstance(side, (int, np.integer)) and not isinstance(side, bool) for side in pair):
        raise TypeError(f"{argument} must be an int or a pair of ints (left, right); got {window!r}.")
    if min(pair) < 0:
        raise ValueError(f"{argument} must not be negative (0 keeps the query's own position); got {window!r}.")
    return int(pair[0]), int(pair[1])


def _as_ids(argument: str, ids: Any, shape: tuple[int, ...] | None = None) -> Int[Array, "B L"]:
    ids = jnp.asarray(ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"{argument} must be integers; got {ids.dtype}.")
    if ids.ndim != 2:
        raise ValueError(f"{argument} must be [B, length]; got shape {list(ids.shape)}.")
    if shape is not None and ids.shape != shape:
        raise ValueError(f"{argument} must be {list(shape)}; got {list(ids.shape)}.")
    return ids
