"""Gated linear attention as people write it by hand: the baseline that speed is measured against."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def scan_attention(query, key, value, g=None, gk=None, gv=None) -> tuple[jax.Array, jax.Array]:
    """(output, final state) by one `lax.scan` over tokens, in the obvious way; differentiate it with `jax.grad`."""
    batch, _, heads, channels = query.shape

    def step(state, row):
        q, k, v, g, gk, gv = row
        if g is not None:
            state = state * jnp.exp(g)[..., None, None]
        if gk is not None:
            state = state * jnp.exp(gk)[..., None]
        if gv is not None:
            state = state * jnp.exp(gv)[..., None, :]
        state = state + k[..., None] * v[..., None, :]
        return state, jnp.einsum("bhk,bhkv->bhv", q, state) * channels**-0.5

    rows = tuple(None if x is None else jnp.moveaxis(x, 1, 0) for x in (query, key, value, g, gk, gv))
    start = jnp.zeros((batch, heads, channels, value.shape[-1]), jnp.float32)
    state, output = lax.scan(step, start, rows)
    return jnp.moveaxis(output, 0, 1), state


def decode_step(state, query, key, value, gk) -> tuple[jax.Array, jax.Array]:
    """One token by hand: (output `[B, 1, H, V]`, state)."""
    state = state * jnp.exp(gk[:, 0])[..., None] + key[:, 0, :, :, None] * value[:, 0, :, None, :]
    return jnp.einsum("bhk,bhkv->bhv", query[:, 0], state)[:, None] * query.shape[-1] ** -0.5, state
