"""Arguments to measure a linear operation with: what a call may meet in use, not only the easy part of it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

SHARE_STRONG, SHARE_RESET = 1 / 16, 1 / 16  # of runs of 64 tokens


def gate(key: jax.Array, shape: tuple[int, ...], dtype: Any, time_axis: int | None) -> jax.Array:
    """Log decays as trained layers have them: mostly near 0, some runs of tokens strong, some with a hard reset.

    Kernels have a short way for weakly gated chunks. With weak gates alone nothing else would be measured or compared.

    Args:
        time_axis: where the tokens are; None: a gate that does not vary with them, which is weak.
    """
    values, runs, place = jax.random.split(key, 3)
    weak = jax.nn.log_sigmoid(jax.random.normal(values, shape)) / 16
    if time_axis is None or shape[time_axis] == 0:
        return weak.astype(dtype)
    tokens = shape[time_axis]
    along = lambda x: x.reshape([-1 if axis == time_axis else 1 for axis in range(len(shape))])
    kind = jnp.repeat(jax.random.uniform(runs, (-(-tokens // 64),)), 64)[:tokens]
    first = jnp.arange(tokens) % 64 == jax.random.randint(place, (), 0, 64)
    strong, reset = kind < SHARE_STRONG, (kind > 1 - SHARE_RESET) & first
    return jnp.where(along(reset), -1e4, jnp.where(along(strong), weak * 400, weak)).astype(dtype)


def equal_offsets(tokens: int, sequences: int) -> jax.Array:
    """Offsets `[sequences + 1]` of nearly equal sequences."""
    return jnp.round(jnp.linspace(0, tokens, sequences + 1)).astype(jnp.int32)
