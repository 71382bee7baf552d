"""What the blocks share, whatever library holds their weights: functions of arrays alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel import attention
from ejkernel.types.mask import MaskInfo

Array = jax.Array


# --8<-- [start:parts]
class Memory(NamedTuple):
    """What a linear block knows of the past: the convolution's last inputs and the recurrence's state."""

    inputs: Array  # [N, taps - 1, channels]
    state: Array  # [N, H, K, V] float32


def rms_norm(x: Array, weight: Array | None = None) -> Array:
    """Each row divided by its root mean square, computed in float32."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + 1e-6)
    return (wide if weight is None else wide * weight).astype(x.dtype)


def by_head(x: Array, heads: int) -> Array:
    """`[B, T, H * D]` as `[B, T, H, D]`."""
    return x.reshape(*x.shape[:2], heads, -1)


def log_decay_of(x: Array, normaliser: float = 16.0) -> Array:
    """Log decays from what a projection gives: near 0, so that at first a state is halved in about 16 steps, not in one.

    `log_sigmoid`, not `sigmoid`: gates go in by their logarithm. Always in float32: bfloat16 has two or three digits of it, and
    it acts once for every token.
    """
    return jax.nn.log_sigmoid(x.astype(jnp.float32)) / normaliser


# --8<-- [end:parts]


class Cache(NamedTuple):
    """What a softmax block knows of the past: keys and values, and how many of them are there."""

    key: Array  # [B, capacity, H, D]
    value: Array
    length: Array  # []


def check_sizes(mixer: str, mixers: Iterable[str], width: int, heads: int) -> None:
    """Raises ValueError for a kind of mixer that is not there, and for heads that do not divide the width."""
    if mixer not in mixers:
        raise ValueError(f"mixer must be one of {', '.join(map(repr, mixers))}; got {mixer!r}.")
    if width % heads:
        raise ValueError(f"width must be a multiple of heads; got {width} and {heads}.")


def empty_cache(batch: int, capacity: int, heads: int, channels: int, dtype: Any) -> Cache:
    """A cache for `capacity` tokens, none of which is there yet."""
    if capacity < 1:
        raise ValueError(f"capacity must be the most tokens, prompt and all, that softmax attention is to see; got {capacity}.")
    shape = (batch, capacity, heads, channels)
    return Cache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype), jnp.int32(0))


def rotary(x: Array, positions: Array) -> Array:
    """Rotary position embedding of `x [B, T, H, D]` at `positions [T]`."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10000.0 ** (-jnp.arange(half) / half)  # [T, D / 2]
    cos, sin = (f(angles)[None, :, None].astype(x.dtype) for f in (jnp.cos, jnp.sin))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def causal_attention(
    query: Array, key: Array, value: Array, cache: Cache | None, cu_seqlens: Array | None
) -> tuple[Array, Cache | None]:
    """Softmax attention over the past, on rotated queries and keys. With a cache, new keys and values go in behind the old.

    Without one, the cache that comes back is full: to go on, begin with `empty_cache`. Packed documents leave none.
    """
    tokens = query.shape[1]
    first: Array | int = 0 if cache is None else cache.length
    positions = first + jnp.arange(tokens)
    query, key = rotary(query, positions), rotary(key, positions)
    if cu_seqlens is not None and cache is not None:
        raise ValueError("cu_seqlens must be None where there is a cache: packed documents begin anew; got both.")
    if cu_seqlens is not None:
        info = MaskInfo.from_cu_seqlens(cu_seqlens, tokens)
    elif cache is None:
        info, cache = None, Cache(key, value, jnp.int32(tokens))
    else:
        _check_room(cache, tokens)
        put = lambda old, new: lax.dynamic_update_slice_in_dim(old, new.astype(old.dtype), first, axis=1)
        cache = Cache(put(cache.key, key), put(cache.value, value), cache.length + tokens)
        key, value = cache.key.astype(query.dtype), cache.value.astype(query.dtype)
        info = _so_far(cache, query.shape[0], positions)
    out = attention(query, key, value, mask_info=info, causal=True, dtype=None, return_weights=False)
    if cache is not None:  # tokens that found no room overwrote others; under jit only the program can tell
        out = jnp.where(cache.length > cache.key.shape[1], jnp.nan, out)
    return out, cache


def _check_room(cache: Cache, tokens: int) -> None:
    """Raises ValueError where tokens do not fit behind those of a cache, if their number is known."""
    capacity = cache.key.shape[1]
    there = 0 if isinstance(cache.length, jax.core.Tracer) else int(cache.length)
    if there + tokens > capacity:
        raise ValueError(
            f"the cache must have room for the tokens that come; it holds {capacity}, {there} are there, and {tokens} came. "
            f"Give the most tokens, prompt and all, as start(batch, capacity) before the first call."
        )


def _so_far(cache: Cache, batch: int, positions: Array) -> MaskInfo:
    """Queries at `positions` against the part of a cache that is filled; segment -1 is padding."""
    there = jnp.arange(cache.key.shape[1])
    rows = lambda x: jnp.broadcast_to(x, (batch, x.shape[0]))
    filled = jnp.where(there < cache.length, 0, -1)
    return MaskInfo.from_segments(rows(jnp.zeros_like(positions)), rows(filled), rows(positions), rows(there))
