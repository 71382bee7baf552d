"""Packed segments taken apart: every segment a row of its own, for kernels that know sequence lengths but not segments."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from ejkernel.types.mask import MaskInfo


class Packing(NamedTuple):
    """Where the tokens of N segments are among all B * T queries and B * S keys, in their order.

    Attributes:
        q_rows: `[N, Lq]`, the queries of each segment; what is beyond its length repeats token 0. N, Lq and Lk are rounded up
            (`_rounded`), so that few packings compile anew.
        kv_rows: `[N, Lk]`, the keys likewise.
        q_lengths: `[N]`, how many queries a segment has; at least 1, as for keys. Rows beyond the last segment have 1.
        kv_lengths: `[N]`.
        back: `[B * T]`, where each query is in `q_rows` (flat); -1 for queries without keys, and padding.
    """

    q_rows: Int[Array, "N Lq"]
    kv_rows: Int[Array, "N Lk"]
    q_lengths: Int[Array, " N"]
    kv_lengths: Int[Array, " N"]
    back: Int[Array, " tokens"]

    @classmethod
    def of(cls, info: MaskInfo, batch: int) -> Packing | None:
        """The packing of segments whose ids are known now; None when they are traced, or positions are not plain counts."""
        if info.q_segment_ids is None or info.kv_segment_ids is None or any(map(_traced, jax.tree.leaves(info))):
            return None
        q_ids, kv_ids = (_rows(ids, batch) for ids in (info.q_segment_ids, info.kv_segment_ids))
        q_rank, kv_rank = (_ranks(ids) for ids in (q_ids, kv_ids))
        for given, rank, ids in ((info.q_positions, q_rank, q_ids), (info.kv_positions, kv_rank, kv_ids)):
            if given is not None and np.any((_rows(given, batch) != rank) & (ids >= 0)):
                return None
        q_names, kv_names = _names(q_ids), _names(kv_ids)
        names = np.intersect1d(q_names[q_ids >= 0], kv_names[kv_ids >= 0])
        if names.size == 0:
            return None
        q_rows, q_lengths, back = _gather(names, q_names, q_ids, q_rank)
        kv_rows, kv_lengths, _ = _gather(names, kv_names, kv_ids, kv_rank)
        return cls(*(jnp.asarray(x, jnp.int32) for x in (q_rows, kv_rows, q_lengths, kv_lengths, back)))

    def unpack(self, x: Array, rows: Int[Array, "N L"]) -> Array:
        """`[B, T, H, D]` as `[N, L, H, D]`, by `q_rows` or `kv_rows`."""
        return x.reshape(-1, *x.shape[2:])[rows]

    def pack(self, x: Array, like: tuple[int, ...]) -> Array:
        """`[N, Lq, H, D]` as `[B, T, H, D]`, with 0 for queries that have no keys."""
        found = x.reshape(-1, *x.shape[2:])[jnp.maximum(self.back, 0)]
        return jnp.where((self.back >= 0)[:, None, None], found, 0).reshape(*like[:3], x.shape[3])


class Packed(NamedTuple):
    """A MaskInfo together with its packing, which has to be found before the ids are traced."""

    info: MaskInfo
    packing: Packing


def packed(info: MaskInfo, batch: int) -> MaskInfo | Packed:
    """The same information with its packing, where there is one."""
    info = info.checked()
    packing = Packing.of(info, batch)
    return info if packing is None else Packed(info, packing)


def everything(info: MaskInfo | Packed) -> MaskInfo | Packed:
    """Information of the same shapes that hides nothing: one segment, counted positions, full rows."""
    if isinstance(info, Packed):
        packing = info.packing
        q_lengths = jnp.full_like(packing.q_lengths, packing.q_rows.shape[1])
        kv_lengths = jnp.full_like(packing.kv_lengths, packing.kv_rows.shape[1])
        return Packed(everything_of(info.info), packing._replace(q_lengths=q_lengths, kv_lengths=kv_lengths))
    return everything_of(info)


def everything_of(info: MaskInfo) -> MaskInfo:
    """A MaskInfo of the same shapes that hides nothing."""
    counted = lambda x: None if x is None else jnp.broadcast_to(jnp.arange(x.shape[-1], dtype=x.dtype), x.shape)
    fields: dict[str, Any] = {"q_positions": counted(info.q_positions), "kv_positions": counted(info.kv_positions)}
    if info.attention_mask is not None:
        fields["attention_mask"] = jnp.ones_like(info.attention_mask)
    for name in ("q_segment_ids", "kv_segment_ids"):
        if getattr(info, name) is not None:
            fields[name] = jnp.zeros_like(getattr(info, name))
    return info.replace(**{name: x for name, x in fields.items() if x is not None})


def _traced(x: Any) -> bool:
    return isinstance(x, jax.core.Tracer)


def _rows(ids: Any, batch: int) -> np.ndarray:
    return np.broadcast_to(np.asarray(ids, np.int64), (batch, ids.shape[1]))


def _ranks(ids: np.ndarray) -> np.ndarray:
    """How many earlier tokens of the same segment there are, as `segment_positions` (in NumPy, since JAX may be tracing)."""
    order = np.argsort(ids, axis=1, kind="stable")
    grouped, index = np.take_along_axis(ids, order, 1), np.arange(ids.shape[1])
    opens = np.diff(grouped, axis=1, prepend=grouped[:, :1] - 1) != 0
    ranks = np.empty_like(ids)
    np.put_along_axis(ranks, order, index - np.maximum.accumulate(np.where(opens, index, 0), axis=1), 1)
    return ranks


def _names(ids: np.ndarray) -> np.ndarray:
    """A number that no other row's segment has."""
    return ids + (np.arange(ids.shape[0]) << 32)[:, None]


def _gather(
    names: np.ndarray, found: np.ndarray, ids: np.ndarray, rank: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """`(rows [N, L], lengths [N], back [tokens])` of the named segments."""
    segment = np.minimum(np.searchsorted(names, found), names.size - 1)
    inside = (names[segment] == found) & (ids >= 0)
    segment, place, token = segment[inside], rank[inside], np.flatnonzero(inside)
    lengths = np.bincount(segment, minlength=names.size)
    count, longest = _rounded(names.size), _rounded(int(np.max(lengths)))
    rows = np.zeros((count, longest + longest % 2), np.int64)  # even: cuDNN's gradient takes no odd lengths
    rows[segment, place] = token
    lengths = np.concatenate([lengths, np.ones(count - names.size, lengths.dtype)])
    back = np.full(ids.size, -1)
    back[token] = segment * rows.shape[1] + place
    return rows, lengths, back


def _rounded(size: int) -> int:
    """A size up to the next quarter of a power of two: at most a quarter is padding, and sizes are few.

    >>> [_rounded(n) for n in (1, 5, 16, 17, 33, 100, 1000, 1025)]
    [1, 5, 16, 20, 40, 112, 1024, 1280]
    """
    step = max(1, (1 << (size - 1).bit_length()) // 8) if size > 1 else 1
    return -(-size // step) * step
