"""Where numbers stand among sorted ones: which sequence a token or a chunk of packed sequences belongs to."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def how_many_up_to(sorted_numbers: jax.Array, numbers: jax.Array, *, or_equal: bool = True) -> jax.Array:
    """For each of `numbers`, how many of `sorted_numbers [N]` are at most it; without `or_equal`, less than it. In int32.

    This is `jnp.searchsorted` with side "right", or "left". That one is a loop with a carry of its own, whose type JAX gets
    wrong inside a `jax.shard_map` that leaves explicit mesh axes alone. N is static, so here the steps are unrolled.

    Example:
        >>> how_many_up_to(jnp.array([2, 2, 5]), jnp.arange(7)).tolist()
        [0, 0, 2, 2, 2, 3, 3]
    """
    size = sorted_numbers.shape[0]
    found = jnp.zeros(numbers.shape, jnp.int32)
    for step in (1 << bit for bit in reversed(range(size.bit_length()))):
        further = found + step
        last = sorted_numbers.at[further - 1].get(mode="clip")  # of those that would be counted
        below = last <= numbers if or_equal else last < numbers
        found = jnp.where((further <= size) & below, further, found)
    return found
