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

from ejkernel._checking import ValueCheck, checking
from ejkernel._numbers import as_array, as_int, is_int, known_values, offsets_mistake
from ejkernel._sizes import known
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

Number = int | Int[Array, ""]
Offset = int | Int[Array, ""] | Int[Array, " B"]
_IDS = ("q_segment_ids", "kv_segment_ids", "q_positions", "kv_positions")
_FARTHEST = 2**30  # farther than any two positions, and added to one still an int32: sys.maxsize keeps everything


@dataclasses.dataclass(frozen=True, eq=False)
class MaskInfo:
    """A boolean mask, or segment ids; build it with a `from_` method.

    A field that was not given is None; the `get_or_compute_` methods compute it. Where there is an `attention_mask`, it alone
    decides; ids and positions beside it, which `apply_causal` and its like keep, only give positions.

    `apply_causal`, `apply_sliding_window`, `apply_chunked`, and the operation's `causal` and `sliding_window` compare
    positions. These are the ones given, or else they count from 0 in each segment. A mask without ids or positions is compared
    by index.

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
        mask = as_array("mask", mask)
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
            cu_seqlens: offsets that start at 0, do not decrease and do not exceed `total`; traced ones are taken at their word.
            total: the length of the row; None takes `cu_seqlens[-1]`, which must then be known while tracing.
        """
        array = as_array("cu_seqlens", cu_seqlens)
        if array.ndim != 1 or array.shape[0] < 1 or not jnp.issubdtype(array.dtype, jnp.integer):
            raise ValueError(f"cu_seqlens must be integers [N+1]; got {array.dtype}{list(array.shape)}.")
        total = _checked_total(total, known_values(cu_seqlens, array))
        if checking():
            end = total if known(total) else None  # with a size that is left open nothing can be compared
            mistake = lambda offsets: offsets_mistake("cu_seqlens", offsets, end, padded=True)
            ValueCheck("cu_seqlens", lambda: (array,), mistake).make()
        array = array.astype(jnp.int32)
        index = jnp.arange(total, dtype=jnp.int32)
        ids = jnp.searchsorted(array[1:], index, side="right").astype(jnp.int32)  # [total]
        inside = index < array[-1]
        starts = array[jnp.minimum(ids, array.shape[0] - 1)]
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
            q, k = self.get_or_compute_positions()
        else:
            batch, _, q_len, kv_len = self.shape
            q, k = (jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (batch, n)) for n in (q_len, kv_len))
            q = q if self.q_positions is None else self.q_positions
            k = k if self.kv_positions is None else self.kv_positions
        return _signed(q), _signed(k)

    def apply_causal(self, offset: Offset = 0) -> MaskInfo:
        """Keeps keys at `k <= q + offset` (positions); `offset` is a number or `[B]`, one for each row, traced or not."""
        return self._restricted(self._distances(offset) <= 0)

    def apply_sliding_window(self, window: Number | tuple[Number, Number], offset: Offset = 0) -> MaskInfo:
        """Keeps keys at `q + offset - left <= k <= q + offset + right` (positions).

        Args:
            window: `(left, right)`, or a number w for `(w, w)`; traced or not.
            offset: a number or `[B]`, one for each row; traced or not.
        """
        pair = tuple(window) if isinstance(window, (tuple, list)) else (window, window)
        if len(pair) != 2:
            raise TypeError(f"window must be an int or a pair of ints (left, right); got {window!r}.")
        rule = "not be negative (0 keeps the query's own position)"
        left, right = (_as_number("window", side, 0, rule) for side in pair)
        distance = self._distances(offset)
        return self._restricted((distance >= -left) & (distance <= right))

    def apply_chunked(self, chunk_size: Number, offset: Offset = 0) -> MaskInfo:
        """Keeps keys in the query's chunk: `k // chunk_size == (q + offset) // chunk_size` (positions).

        Not causal by itself: add `apply_causal()`.

        Args:
            chunk_size: a number of at least 1, traced or not.
            offset: a number or `[B]`, one for each row; traced or not.
        """
        size = _as_number("chunk_size", chunk_size, 1, "be at least 1")
        q, k = self._position_planes(offset)
        return self._restricted(k // size == q // size)

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
        if isinstance(ids, tuple) and len(ids) != 2:
            raise ValueError(f"ids must be [B, L] or a pair ([B, Q], [B, K]); got a tuple of {len(ids)}.")
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
        lengths = as_array("lengths", lengths)
        if lengths.shape != (self.batch_size,):
            raise ValueError(f"lengths must be [{self.batch_size}] (one per row); got shape {list(lengths.shape)}.")
        if not jnp.issubdtype(lengths.dtype, jnp.integer):
            raise TypeError(f"lengths must be integers; got {lengths.dtype}.")
        filled = jnp.arange(self.kv_len, dtype=jnp.int32)[None] < lengths[:, None].astype(jnp.int32)  # [B, K]
        if self.attention_mask is not None:
            return self._restricted(filled[:, None, None, :])
        return self.replace(kv_segment_ids=jnp.where(filled, self._held_segment_ids()[1], -1))

    def replace(self, **fields: Any) -> MaskInfo:
        """A copy with other fields, in the form that the `from_` methods give them: `info.replace(q_positions=...)`."""
        return dataclasses.replace(self, **{name: _as_field(name, x) for name, x in fields.items()})

    def checked(self) -> MaskInfo:
        """The same in the form that the `from_` methods give; ValueError or TypeError where it cannot be."""
        return self.replace(**vars(self))

    def __and__(self, other: MaskInfo) -> MaskInfo:
        return self._restricted(self._mask_of(other))

    def __or__(self, other: MaskInfo) -> MaskInfo:
        return self._redrawn(self.get_or_compute_attention_mask() | self._mask_of(other))

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

    def _mask_of(self, other: MaskInfo) -> Bool[Array, "B H Q K"]:
        """Another's mask, if it is over the same queries and keys."""
        mine, its = self.shape, other.shape
        if mine[2:] != its[2:] or any(1 not in (a, b) and a != b for a, b in zip(mine[:2], its[:2], strict=True)):
            raise ValueError(f"masks that are combined must have one shape (or batch or heads of 1); got {mine} and {its}.")
        return other.get_or_compute_attention_mask()

    def _position_planes(self, offset: Offset) -> tuple[Int[Array, "B 1 Q 1"], Int[Array, "B 1 1 K"]]:
        """Positions of queries, moved by `offset`, and of keys."""
        widest = jax.dtypes.canonicalize_dtype(np.int64)
        q, k = (positions.astype(widest) for positions in self.compared_positions())
        return q[:, None, :, None] + _as_offset(offset, self.batch_size).astype(widest), k[:, None, None, :]

    def _distances(self, offset: Offset) -> Int[Array, "B 1 Q K"]:
        """How far keys are ahead of their queries."""
        q, k = self._position_planes(offset)
        return k - q

    def _restricted(self, keep: Bool[Array, "B H Q K"]) -> MaskInfo:
        return self.replace(attention_mask=self.get_or_compute_attention_mask() & keep)

    def _redrawn(self, mask: Bool[Array, "B H Q K"]) -> MaskInfo:
        """Another mask over the same tokens: their positions stay, their segments no longer say anything about it."""
        return self.replace(attention_mask=mask, q_segment_ids=None, kv_segment_ids=None)


jax.tree_util.register_dataclass(MaskInfo, data_fields=[field.name for field in dataclasses.fields(MaskInfo)], meta_fields=[])


def as_window(argument: str, window: int | tuple[int, int]) -> tuple[int, int]:
    """`(left, right)` from an int w, which is `(w, w)`, or a pair; TypeError or ValueError naming `argument`."""
    pair = tuple(window) if isinstance(window, (tuple, list)) else (window, window)
    if len(pair) != 2 or not all(map(is_int, pair)):
        raise TypeError(f"{argument} must be an int or a pair of ints (left, right); got {window!r}.")
    if min(pair) < 0:
        raise ValueError(f"{argument} must not be negative (0 keeps the query's own position); got {window!r}.")
    return min(int(pair[0]), _FARTHEST), min(int(pair[1]), _FARTHEST)


def _signed(ids: Int[Array, "B L"]) -> Int[Array, "B L"]:
    """Ids or positions in a dtype that holds padding's -1 and their differences: negative ones, and more than 8 bits hold."""
    return ids if ids.dtype in (jnp.int32, jnp.int64) else ids.astype(jnp.int32)


def _as_number(argument: str, value: Any, least: int, rule: str) -> Int[Array, ""] | int:
    """A known integer within int32, or a traced scalar, which is taken at its word."""
    if is_int(value):
        number = min(as_int(argument, value), _FARTHEST)
        if number < least:
            raise ValueError(f"{argument} must {rule}; got {number}.")
        return number
    if isinstance(value, jax.core.Tracer) and value.shape == () and jnp.issubdtype(value.dtype, jnp.integer):
        return value.astype(jnp.int32)
    came = f"{value.dtype}{list(value.shape)}" if isinstance(value, (jax.Array, np.ndarray)) else repr(value)
    raise TypeError(f"{argument} must be an int or an integer scalar; got {came}.")


def _as_offset(offset: Offset, batch: int) -> Int[Array, " ..."]:
    """An offset as it is added to `[B, 1, Q, 1]`: a scalar, or `[B, 1, 1, 1]`."""
    array = as_array("offset", offset)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"offset must be an int or integers [{batch}] (one per row); got {array.dtype}.")
    if array.shape not in ((), (batch,)):
        raise ValueError(f"offset must be a number or [{batch}] (one per row); got shape {list(array.shape)}.")
    return array.reshape(array.shape + (1,) * 3) if array.ndim else array


def _checked_total(total: Any, offsets: np.ndarray | None) -> int:
    """The length of a packed row, with its offsets checked against it where they are known."""
    if total is not None and not known(total) and jax.export.is_symbolic_dim(total):
        return total  # type: ignore[return-value]  # a size that `jax.export` leaves open takes offsets at their word
    length = None if total is None else as_int("total", total, least=0)
    if offsets is not None and (mistake := offsets_mistake("cu_seqlens", offsets, length, padded=True)) is not None:
        raise ValueError(mistake)
    if length is None and offsets is None:
        raise ValueError("total must be given when cu_seqlens is traced: shapes cannot depend on its values.")
    return int(offsets[-1]) if length is None else length  # type: ignore[index]  # one of them is known


def _as_field(name: str, value: Any) -> Any:
    """What a MaskInfo may hold by this name, checked."""
    if value is None or name not in ("attention_mask", *_IDS):
        return value
    if name in _IDS:
        return _as_ids(name, value)
    mask = as_array(name, value)
    if mask.ndim != 4 or mask.dtype != bool:
        came = f"{mask.dtype}{list(mask.shape)}"
        raise ValueError(f"{name} must be bool [B, 1|H, Q, K]; got {came}. MaskInfo.from_attention_mask takes other ranks.")
    return mask


def _as_ids(argument: str, ids: Any, shape: tuple[int, ...] | None = None) -> Int[Array, "B L"]:
    ids = as_array(argument, ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"{argument} must be integers; got {ids.dtype}.")
    if ids.ndim != 2:
        raise ValueError(f"{argument} must be [B, length]; got shape {list(ids.shape)}.")
    if shape is not None and ids.shape != shape:
        raise ValueError(f"{argument} must be {list(shape)}; got {list(ids.shape)}.")
    return _signed(ids)
