"""Which tiles each tile of queries must look at, and on which of them nothing masks: for masks that are data.

Bounds on indices need no table: the kernels know them.
"""

from __future__ import annotations

import math
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
    q_low, q_high = _extent(others.get("q_positions"), lengths[0], blocks[0])  # [b, 1, tiles, 1]
    k_low, k_high = (x.swapaxes(2, 3) for x in _extent(others.get("kv_positions"), lengths[1], blocks[1]))
    if left is not None:
        needed, full = needed & (k_high >= q_low - left), full & (k_low >= q_high - left)
    if right is not None:
        needed, full = needed & (k_low <= q_high + right), full & (k_high <= q_low + right)
    if others.get("q_segment_ids") is not None:
        q, k = _blocks(others["q_segment_ids"], blocks[0]), _blocks(others["kv_segment_ids"], blocks[1])
        # Padding is left out of both ends of the range, so tiles of padding overlap with nothing.
        top = jnp.iinfo(q.dtype).max
        low = lambda x: jnp.where(x >= 0, x, top).min(2)
        q_from, q_to, q_least = (x[:, None, :, None] for x in (low(q), q.max(2), q.min(2)))
        k_from, k_to, k_least = (x[:, None, None, :] for x in (low(k), k.max(2), k.min(2)))
        needed = needed & (q_from <= k_to) & (k_from <= q_to)
        full = full & (q_least == q_to) & (k_least == k_to) & (q_to == k_to) & (q_to >= 0)
    if others.get("mask") is not None:
        kept, scores = _counted(others["mask"], lengths, blocks)
        needed, full = needed & (kept > 0), full & (kept == scores)
    return needed, full


def _extent(positions: Array | None, length: int, block: int) -> tuple[Array, Array]:
    """The lowest and the highest position of each tile, `[b, 1, tiles, 1]`; indices where there are none."""
    if positions is None:
        positions = jnp.arange(length, dtype=jnp.int32)[None]
    blocks = _blocks(positions, block)
    return blocks.min(2)[:, None, :, None], blocks.max(2)[:, None, :, None]


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
