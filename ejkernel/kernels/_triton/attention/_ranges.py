"""Which tiles each tile of queries must look at, and on which of them nothing masks: for masks that are data.

Bounds on indices need no table: the kernels know them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, UInt32

from ejkernel.callib import cdiv

COUNTED = 32  # queries whose scores are counted together


def tile_ranges(
    others: dict[str, Any], left: int | None, right: int | None, lengths: tuple[int, int], blocks: tuple[int, int],
    *, of_keys: bool = False, groups: tuple[int, int] | None = None,
) -> Int[Array, "b h tiles 4"] | None:  # fmt: skip
    """(first, full_first, full_last, last) for each tile of queries, as `visited` of the kernels gives them; None: no table.

    Args:
        others: mask, segment ids and positions, where there are any.
        lengths: T and S.
        blocks: queries and keys of a tile.
        of_keys: ranges of query tiles for each tile of keys instead.
        groups: (Hkv, G): heads of a group are visited together.
    """
    if all(others.get(name) is None for name in ("mask", "q_segment_ids", "q_positions")):
        return None
    needed, full = _tiles(others, left, right, lengths, blocks)  # [b, h, tiles of queries, tiles of keys]
    if groups is not None and needed.shape[1] == groups[0] * groups[1]:
        split = lambda x: x.reshape(x.shape[0], *groups, *x.shape[2:])
        needed, full = split(needed).any(2), split(full).all(2)
    return _ranges(needed, full, lengths, blocks, of_keys)


def bit_ranges(
    bits: UInt32[Array, "b h T words"], lengths: tuple[int, int], blocks: tuple[int, int], *, of_keys: bool = False
) -> Int[Array, "b h tiles 4"]:
    """The same from the bits of a packed mask, which say everything."""
    T, S = lengths
    block_q, block_k = blocks
    width = min(block_k, 32)  # bits that are counted together
    parts = [(bits >> np.uint32(n)) & np.uint32((1 << width) - 1) for n in range(0, 32, width)]
    counts = jnp.stack([jax.lax.population_count(x) for x in parts], -1).astype(jnp.uint8)  # [b, h, T, words, 32 / width]
    counts = jnp.pad(counts, ((0, 0), (0, 0), (0, -T % block_q), (0, 0), (0, 0)))
    counts = counts.reshape(*bits.shape[:2], cdiv(T, block_q), block_q, -1, block_k // width)
    kept = counts.sum((3, 5), dtype=jnp.int32)[..., : cdiv(S, block_k)]  # [b, h, tiles of queries, tiles of keys]
    return _ranges(kept > 0, kept == _scores(lengths, blocks), lengths, blocks, of_keys)


def _scores(lengths: tuple[int, int], blocks: tuple[int, int]) -> Int[Array, "1 1 nq nk"]:
    """How many scores each tile has."""
    held = [
        jnp.minimum(block, length - block * jnp.arange(cdiv(length, block), dtype=jnp.int32))
        for length, block in zip(lengths, blocks, strict=True)
    ]
    return held[0][None, None, :, None] * held[1][None, None, None, :]


def _ranges(
    needed: Bool[Array, "b h nq nk"], full: Bool[Array, "b h nq nk"], lengths: tuple[int, int], blocks: tuple[int, int],
    of_keys: bool,
) -> Int[Array, "b h tiles 4"]:  # fmt: skip
    """From which tiles are needed, and which are seen wholly."""
    if of_keys:
        needed, full = needed.swapaxes(2, 3), full.swapaxes(2, 3)
    length, block = (lengths[0], blocks[0]) if of_keys else (lengths[1], blocks[1])
    index = jnp.arange(needed.shape[3], dtype=jnp.int32)[None, None, None, :]
    full = full & ((index + 1) * block <= length)
    count = jnp.int32(needed.shape[3])
    first = jnp.where(needed, index, count).min(3)
    last = jnp.where(needed, index + 1, 0).max(3)
    full_first = jnp.where(full, index, count).min(3)
    full_last = jnp.where(~full & (index > full_first[..., None]), index, count).min(3)
    first = jnp.minimum(first, last)
    full_first = jnp.minimum(full_first, last)
    return jnp.stack([first, full_first, jnp.maximum(full_first, jnp.minimum(full_last, last)), last], -1).astype(jnp.int32)


def _tiles(
    others: dict[str, Any], left: int | None, right: int | None, lengths: tuple[int, int], blocks: tuple[int, int]
) -> tuple[Bool[Array, "b h nq nk"], Bool[Array, "b h nq nk"]]:
    """(whether any query of a tile may attend to any key, whether all may to all)."""
    count_q, count_k = (cdiv(length, block) for length, block in zip(lengths, blocks, strict=True))
    needed = full = jnp.ones((1, 1, count_q, count_k), bool)
    q_at = _positions(others.get("q_positions"), lengths[0], blocks[0])  # [b, tiles, block]
    k_at = _positions(others.get("kv_positions"), lengths[1], blocks[1])
    q_reach, k_reach = _of_queries(q_at.min(2), q_at.max(2)), _of_keys(k_at.min(2), k_at.max(2))
    needed = needed & _within(q_reach, k_reach, left, right)
    full = full & _within(q_reach[::-1], k_reach[::-1], left, right)  # the pair that is farthest apart
    if others.get("q_segment_ids") is not None:
        q, k = _blocks(others["q_segment_ids"], blocks[0]), _blocks(others["kv_segment_ids"], blocks[1])
        needed = needed & _share_a_segment(q, k, q_at, k_at, left, right)
        q_least, q_most, k_least, k_most = (*_of_queries(q.min(2), q.max(2)), *_of_keys(k.min(2), k.max(2)))
        full = full & (q_least == q_most) & (k_least == k_most) & (q_most == k_most) & (q_most >= 0)
    if others.get("mask") is not None:
        kept, scores = _counted(others["mask"], lengths, blocks)
        needed, full = needed & (kept > 0), full & (kept == scores)
    return needed, full


def _within(q_reach: Sequence[Array], k_reach: Sequence[Array], left: int | None, right: int | None) -> Any:
    """Whether a query may see a key, each from the lowest to the highest position of a tile."""
    (q_low, q_high), (k_low, k_high) = q_reach, k_reach
    near: Any = True
    if left is not None:
        near = near & (k_high >= q_low - left)
    if right is not None:
        near = near & (k_low <= q_high + right)
    return near


def _share_a_segment(
    q: Int[Array, "b nq block"], k: Int[Array, "b nk block"], q_at: Array, k_at: Array, left: int | None, right: int | None
) -> Bool[Array, "b 1 nq nk"]:
    """Whether a query of a tile and a key of another may be of one segment and in reach of each other.

    The tile where a document ends has the next one's first positions too, so that by all of its positions it is in reach of
    every query of the document. Its first and its last segment therefore have their own; segments between them, which few
    tiles have, count as in reach.
    """
    q_first, q_last, q_between = _segments(q, q_at)
    k_first, k_last, k_between = _segments(k, k_at)
    (q_from, *_), (q_to, *_), (q_between,) = _of_queries(*q_first), _of_queries(*q_last), _of_queries(q_between)
    (k_from, *_), (k_to, *_), (k_between,) = _of_keys(*k_first), _of_keys(*k_last), _of_keys(k_between)
    shared = (q_between | k_between) & (q_from < k_to) & (k_from < q_to)
    for q_id, *q_reach in (_of_queries(*q_first), _of_queries(*q_last)):
        for k_id, *k_reach in (_of_keys(*k_first), _of_keys(*k_last)):
            shared = shared | ((q_id == k_id) & _within(q_reach, k_reach, left, right))
    return shared & (q_from <= k_to) & (k_from <= q_to)  # nothing overlaps with tiles of padding


def _segments(ids: Int[Array, "b n block"], at: Array) -> tuple[list[Array], list[Array], Array]:
    """Of each tile the lowest and the highest segment but padding, each (id, its lowest position, its highest), and whether
    there are others between them; all `[b, n]`. Of a tile of padding the lowest is above the highest."""
    bounds, positions = jnp.iinfo(ids.dtype), jnp.iinfo(at.dtype)
    ends = [jnp.where(ids >= 0, ids, bounds.max).min(2), ids.max(2)]
    found = []
    for end in ends:
        own = ids == end[:, :, None]
        found.append([end, jnp.where(own, at, positions.max).min(2), jnp.where(own, at, positions.min).max(2)])
    between = (ids > ends[0][:, :, None]) & (ids < ends[1][:, :, None])
    return found[0], found[1], between.any(2)


def _of_queries(*of_tiles: Array) -> tuple[Array, ...]:
    """`[b, tiles]` as `[b, 1, tiles, 1]`."""
    return tuple(x[:, None, :, None] for x in of_tiles)


def _of_keys(*of_tiles: Array) -> tuple[Array, ...]:
    """`[b, tiles]` as `[b, 1, 1, tiles]`."""
    return tuple(x[:, None, None, :] for x in of_tiles)


def _positions(positions: Array | None, length: int, block: int) -> Int[Array, "b tiles block"]:
    """Those of each tile's tokens; indices where there are none."""
    return _blocks(jnp.arange(length, dtype=jnp.int32)[None] if positions is None else positions, block)


def _blocks(x: Array, block: int) -> Array:
    """`[b, L]` as `[b, tiles, block]`, the last tile filled up with its last value."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % block)), mode="edge")
    return x.reshape(x.shape[0], -1, block)


def _counted(
    mask: Bool[Array, "b h t s"], lengths: tuple[int, int], blocks: tuple[int, int]
) -> tuple[Int[Array, "b h nq nk"], Int[Array, "1 1 nq nk"]]:
    """(how many scores of each tile a mask keeps, how many there are); axes of size 1 do not vary."""
    sizes = [1 if given == 1 else block for given, block in zip(mask.shape[2:], blocks, strict=True)]
    pad = [(0, -given % size) for given, size in zip(mask.shape[2:], sizes, strict=True)]
    x = jnp.pad(mask, ((0, 0), (0, 0), *pad))
    # The mask itself is read once for the tables of all kernels: by COUNTED queries, in one byte a key.
    rows = math.gcd(sizes[0], COUNTED)
    x = x.reshape(*x.shape[:2], x.shape[2] // rows, rows, x.shape[3]).sum(3, dtype=jnp.uint8)
    x = x.reshape(*x.shape[:2], -1, sizes[0] // rows, x.shape[3] // sizes[1], sizes[1])
    kept = x.sum(5, dtype=jnp.int32).sum(3, dtype=jnp.int32)  # [b, h, tiles of queries, tiles of keys], or 1 of them
    return kept, _scores((mask.shape[2], mask.shape[3]), (sizes[0], sizes[1]))
