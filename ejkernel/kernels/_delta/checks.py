"""Argument checks of the delta rule. Each error names the argument, what is legal and what came.

What means the same for every recurrence (dtypes, ranks, offsets, states, the scale) is checked by `_linear.checks`.
"""

from __future__ import annotations

from typing import Any

import jax

from ejkernel.kernels._linear.checks import Dims, float_array, heads_and_channels

SHAPES = "(batch, time, heads, key channels)"


def query_key_value(q: jax.Array, k: jax.Array, v: jax.Array) -> None:
    """query and key `[B, T, Hk, K]` alike; value `[B, T, H, V]` with a multiple of their heads."""
    B, T, Hk, K = q.shape
    if k.shape != q.shape:
        raise ValueError(f"key must be [{B}, {T}, {Hk}, {K}] {SHAPES} like query; got {list(k.shape)}.")
    if v.shape[:2] != (B, T):
        raise ValueError(
            f"value must be [{B}, {T}, value heads, value channels] (batch, time, ...) to match query; got {list(v.shape)}."
        )
    H = v.shape[2]
    heads_and_channels(q, k, v)
    if H % Hk:
        raise ValueError(
            f"value must have a multiple of the {Hk} heads of query and key, since each of these serves as many value heads; "
            f"got {H}."
        )


def dims_of(q: jax.Array, v: jax.Array, sequences: int) -> Dims:
    """The sizes of a call: H counts value heads, which have the states, and Hkv the heads of query and key."""
    (B, T, Hk, K), (H, V) = q.shape, v.shape[2:]
    return Dims(B, T, H, Hk, K, V, sequences)


def beta(dims: Dims, x: Any, packed_rank3: bool) -> jax.Array:
    """`[B, T, H]`, one beta for each value head."""
    array = float_array("beta", x)
    legal = (dims.T, dims.H) if packed_rank3 else (dims.B, dims.T, dims.H)
    if array.shape != legal:
        names = "tokens, value heads" if packed_rank3 else "batch, time, value heads"
        hint = ""
        if array.shape[:-1] == legal:  # one for each channel, as gates have, or for one
            hint = " It goes in as beta[..., 0]." if array.shape[-1] == 1 else " The order is query, key, value, beta, g."
        raise ValueError(f"beta must be {list(legal)} ({names}) to match value; got {list(array.shape)}.{hint}")
    return array[None] if packed_rank3 else array


def gate(dims: Dims, g: Any, packed_rank3: bool) -> jax.Array | None:
    """None, `[B, T, H]` (one decay for each value head) or `[B, T, H, K]` (one for each of its key channels)."""
    if g is None:
        return None
    array = float_array("g", g)
    per_head = (dims.T, dims.H) if packed_rank3 else (dims.B, dims.T, dims.H)
    if array.shape not in (per_head, (*per_head, dims.K)):
        names = "tokens, value heads" if packed_rank3 else "batch, time, value heads"
        hint = " A gate per head goes in as g[..., 0]." if array.shape == (*per_head, 1) else ""
        raise ValueError(
            f"g must be {list(per_head)} ({names}) or {[*per_head, dims.K]} (..., key channels) to match value and key; "
            f"got {list(array.shape)}.{hint}"
        )
    return array[None] if packed_rank3 else array
