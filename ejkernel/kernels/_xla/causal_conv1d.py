"""The short causal convolution as XLA computes it: W shifted products, under every transformation."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from ejkernel._search import how_many_up_to

Array = jax.Array


# Recomputed for the gradient, which needs nothing but the inputs then: as it stands the chain rule keeps every shifted input,
# the sum and the sigmoid in float32, which for 16-bit inputs is 14 times what x takes.
@functools.partial(jax.checkpoint, static_argnums=(0,))
def activated(activation: str | None, arrays: dict[str, Array], offsets: Array | None) -> Array:
    x = arrays["x"]
    if offsets is not None:  # what lies after the last sequence is nobody's: it changes nothing, whatever it holds
        used = (jnp.arange(x.shape[1], dtype=jnp.int32) < offsets[-1])[None, :, None]
        x = jnp.where(used, x, 0)
    y = _convolved(x, arrays["weight"], arrays.get("bias"), arrays.get("state"), offsets)
    y = (jax.nn.silu(y) if activation == "silu" else y).astype(x.dtype)
    return y if offsets is None else jnp.where(used, y, 0)


def _convolved(x: Array, weight: Array, bias: Array | None, state: Array | None, offsets: Array | None) -> Array:
    """`[B, T, C]` in float32 or wider: W shifted products, plus what the first W - 1 tokens of a sequence see of its state."""
    wide = jnp.float64 if x.dtype == jnp.float64 else jnp.float32  # promote_types refuses under strict promotion
    W, T = weight.shape[0], x.shape[1]
    w = weight.astype(wide)
    # Inputs are widened before they are shifted, so that the gradient too is summed over the taps in float32 and rounded once.
    if offsets is None:
        seen = _with_past(x, state, W - 1).astype(wide)  # [B, W - 1 + T, C]
        terms = [w[j][None, None] * jax.lax.slice_in_dim(seen, j, j + T, axis=1) for j in range(W)]
    else:
        x, state = x.astype(wide), None if state is None else state.astype(wide)
        terms = [w[j][None, None] * _inputs_before(x, state, offsets, W - 1 - j) for j in range(W)]
    total = sum(terms[1:], terms[0])
    return total if bias is None else total + bias.astype(wide)[None, None]


def _with_past(x: Array, state: Array | None, kept: int) -> Array:
    return jnp.pad(x, [(0, 0), (kept, 0), (0, 0)]) if state is None else jnp.concatenate([state, x], 1)


def _inputs_before(x: Array, state: Array | None, offsets: Array, back: int) -> Array:
    """The input `back` tokens before each token of a packed row `[1, T, C]`, of its own sequence or its state."""
    if back == 0:
        return x
    token = jnp.arange(x.shape[1], dtype=jnp.int32)
    sequence = jnp.minimum(how_many_up_to(offsets[1:], token), offsets.shape[0] - 2)
    place = token - offsets[sequence]  # [T]: which token of its sequence
    shifted = jnp.pad(x, [(0, 0), (back, 0), (0, 0)])[:, : x.shape[1]]
    own = ((place >= back) | (token >= offsets[-1]))[None, :, None]  # after the last sequence x is 0, a state may be NaN
    if state is None:
        return jnp.where(own, shifted, 0)
    kept = state.shape[1]
    from_state = state[sequence, jnp.clip(kept - back + place, 0, kept - 1)]  # [T, C]
    return jnp.where(own, shifted, from_state[None])


def last_inputs(x: Array, state: Array | None, offsets: Array | None, kept: int) -> Array:
    """`[N, W - 1, C]`: the last inputs of each sequence, older ones from its initial state where it is shorter."""
    if state is not None and 0 in x.shape:
        return state
    if offsets is None:
        return jax.lax.slice_in_dim(_with_past(x, state, kept), x.shape[1], x.shape[1] + kept, axis=1)
    if x.shape[1] == 0 or kept == 0:
        return jnp.zeros((offsets.shape[0] - 1, kept, x.shape[2]), x.dtype) if state is None else state
    back = jnp.arange(kept, 0, -1, dtype=jnp.int32)[None]  # [1, W - 1]: how many tokens before the sequence's end
    length = jnp.diff(offsets)[:, None]
    from_row = x[0][jnp.clip(offsets[1:, None] - back, 0, x.shape[1] - 1)]  # [N, W - 1, C]
    own = (back <= length)[..., None]
    if state is None:
        return jnp.where(own, from_row, 0)
    older = jnp.clip(kept - back + length, 0, kept - 1)  # [N, W - 1]
    return jnp.where(own, from_row, jnp.take_along_axis(state, older[..., None], axis=1))
