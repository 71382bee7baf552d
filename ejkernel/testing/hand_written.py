"""Gated linear attention as people write it by hand: the baseline that speed is measured against."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def scan_attention(
    query: Float[Array, "B T H K"],
    key: Float[Array, "B T Hkv K"],
    value: Float[Array, "B T Hkv V"],
    g: Float[Array, "B T H"] | Float[Array, "B T H K"] | None = None,
    g_gamma: Float[Array, " H"] | None = None,
    gk: Float[Array, "B T H K"] | None = None,
    gv: Float[Array, "B T H V"] | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """(output, final state) by one `lax.scan` over tokens, in the obvious way; differentiate it with `jax.grad`.

    Example:
        >>> ones = jnp.ones((1, 3, 1, 1))
        >>> scan_attention(ones, ones, ones)[0].ravel().tolist()
        [1.0, 2.0, 3.0]
    """
    batch, _, heads, channels = query.shape
    key, value = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (key, value))

    def step(state: jax.Array, row: tuple) -> tuple[jax.Array, jax.Array]:
        q, k, v, g, gk, gv = row
        if g is not None:
            state = state * (jnp.exp(g)[..., None, None] if g.ndim == 2 else jnp.exp(g)[..., None])
        if g_gamma is not None:
            state = state * jnp.exp(g_gamma)[None, :, None, None]
        if gk is not None:
            state = state * jnp.exp(gk)[..., None]
        if gv is not None:
            state = state * jnp.exp(gv)[..., None, :]
        state = state + k[..., None] * v[..., None, :]
        return state, jnp.einsum("bhk,bhkv->bhv", q, state) * channels**-0.5

    rows = tuple(None if x is None else jnp.moveaxis(x, 1, 0) for x in (query, key, value, g, gk, gv))
    start = jnp.zeros((batch, heads, channels, value.shape[-1]), jnp.float32)
    state, output = lax.scan(step, start, rows)
    return jnp.moveaxis(output, 0, 1).astype(query.dtype), state


def decode_step(
    state: Float[Array, "B H K V"],
    query: Float[Array, "B 1 H K"],
    key: Float[Array, "B 1 H K"],
    value: Float[Array, "B 1 H V"],
    gk: Float[Array, "B 1 H K"],
) -> tuple[Float[Array, "B 1 H V"], Float[Array, "B H K V"]]:
    """One token by hand: (output, state)."""
    state = state * jnp.exp(gk[:, 0])[..., None] + key[:, 0, :, :, None] * value[:, 0, :, None, :]
    return jnp.einsum("bhk,bhkv->bhv", query[:, 0], state)[:, None] * query.shape[-1] ** -0.5, state


def scan_delta_rule(
    query: Float[Array, "B T Hk K"],
    key: Float[Array, "B T Hk K"],
    value: Float[Array, "B T H V"],
    beta: Float[Array, "B T H"],
    g: Float[Array, "B T H"] | Float[Array, "B T H K"] | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H K V"]]:
    """(output, final state) of the delta rule by one `lax.scan` over tokens, in the obvious way.

    Example:
        >>> ones = jnp.ones((1, 3, 1, 1))
        >>> scan_delta_rule(ones, ones, ones, ones[..., 0] / 2)[0].ravel().tolist()
        [0.5, 0.75, 0.875]
    """
    heads, channels = value.shape[2], query.shape[3]
    query, key = (jnp.repeat(x, heads // x.shape[2], axis=2) for x in (query, key))

    def step(state: jax.Array, row: tuple) -> tuple[jax.Array, jax.Array]:
        q, k, v, b, g = row
        if g is not None:
            state = state * (jnp.exp(g)[..., None, None] if g.ndim == 2 else jnp.exp(g)[..., None])
        error = v - jnp.einsum("bhk,bhkv->bhv", k, state)
        state = state + b[..., None, None] * k[..., None] * error[..., None, :]
        return state, jnp.einsum("bhk,bhkv->bhv", q, state) * channels**-0.5

    rows = tuple(None if x is None else jnp.moveaxis(x, 1, 0) for x in (query, key, value, beta, g))
    start = jnp.zeros((value.shape[0], heads, channels, value.shape[3]), jnp.float32)
    state, output = lax.scan(step, start, rows)
    return jnp.moveaxis(output, 0, 1).astype(query.dtype), state
