"""Which weights dropout keeps: a function of the row's two random words and the key's index, and of nothing else.

So the same weights are dropped forward and backward, directly and by blocks of any size, and nothing of size T * S is stored.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32


def kept(words: UInt32[Array, "*rows 2"], columns: Int[Array, " K"], prob: float) -> Bool[Array, "*rows K"]:
    """True with probability `1 - prob`, independently for every row and column.

    Example:
        >>> words = jnp.array([[1, 2], [3, 4]], jnp.uint32)
        >>> kept(words, jnp.arange(1000), 0.3).mean().round(1)
        Array(0.7, dtype=float32)
    """
    start = columns.astype(jnp.uint32).reshape(*[1] * (words.ndim - 1), -1) * jnp.uint32(0x9E3779B9)  # [..., K]
    mixed = _mix(start + words[..., 0, None])  # [*rows, K]
    bits = _mix(mixed ^ words[..., 1, None])
    return bits >= jnp.uint32(min(round(prob * 2**32), 2**32 - 1))


def _mix(x: UInt32[Array, " ..."]) -> UInt32[Array, " ..."]:
    """A bijection of 32-bit words in which every input bit flips about half of the output bits."""
    # Odd multipliers without structure: the fractional bits of sqrt(2) and sqrt(3).
    x = (x ^ (x >> 16)) * jnp.uint32(0x6A09E667)
    x = (x ^ (x >> 15)) * jnp.uint32(0xBB67AE85)
    return x ^ (x >> 16)
