"""Two layers to put into a model of one's own: gated linear attention, and gated DeltaNet.

Both read `x [B, T, width]` and what they know of the past, and give their output and what they know after these tokens. That is
all of decoding: the same call with one token and the state of the one before. None is an empty past.
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ejkernel.modules import GatedDeltaRuleConfig, GLAttentionConfig, causal_conv1d, gated_delta_rule, gla_attention

Fields = dict[str, Any]  # of a configuration


# --8<-- [start:gla]
class GatedLinearAttention(eqx.Module):
    """o = norm(GLA(q, k, v, g)) * silu(gate), projected back; the gates g are one log decay per key channel and token."""

    qkv: eqx.nn.Linear
    decay: eqx.nn.Linear
    gate: eqx.nn.Linear
    out: eqx.nn.Linear
    heads: int = eqx.field(static=True)

    def __init__(self, width: int, heads: int, *, key: jax.Array):
        keys = jax.random.split(key, 4)
        self.qkv = eqx.nn.Linear(width, 3 * width, use_bias=False, key=keys[0])
        self.decay = eqx.nn.Linear(width, width, key=keys[1])
        self.gate = eqx.nn.Linear(width, width, key=keys[2])
        self.out = eqx.nn.Linear(width, width, use_bias=False, key=keys[3])
        self.heads = heads

    def __call__(self, x: jax.Array, state: jax.Array | None, how: Fields | None = None) -> tuple[jax.Array, jax.Array]:
        """`x [B, T, width]` and a state `[B, H, K, V]` -> the same after these tokens. `how=None` lets the library choose."""
        q, k, v = (by_head(y, self.heads) for y in jnp.split(each(self.qkv, x), 3, axis=-1))  # [B, T, H, K]
        g = jax.nn.log_sigmoid(by_head(each(self.decay, x), self.heads) + 3) / 4  # log decays: at first they keep 99 % a step
        cfg = None if how is None else GLAttentionConfig(**how)
        o, state = gla_attention(q, k, v, g, initial_state=state, return_state=True, cfg=cfg)
        return each(self.out, rms_norm(o).reshape(x.shape) * jax.nn.silu(each(self.gate, x))), state


# --8<-- [end:gla]


# --8<-- [start:delta]
class GatedDeltaNet(eqx.Module):
    """o = norm(delta(q, k, v, beta, g)) * silu(gate), projected back; q, k and v come through a short causal convolution.

    beta, how much is written, and g, the log decay, are one number per head and token.
    """

    qkv: eqx.nn.Linear
    convolution: jax.Array  # [taps, 3 * width]
    beta: eqx.nn.Linear
    decay: eqx.nn.Linear
    A_log: jax.Array  # [H]
    dt_bias: jax.Array  # [H]
    gate: eqx.nn.Linear
    norm: jax.Array  # [V]
    out: eqx.nn.Linear
    heads: int = eqx.field(static=True)

    def __init__(self, width: int, heads: int, taps: int = 4, *, key: jax.Array):
        keys = jax.random.split(key, 8)
        uniform = lambda key, shape, low, high: jax.random.uniform(key, shape, minval=low, maxval=high)
        self.qkv = eqx.nn.Linear(width, 3 * width, use_bias=False, key=keys[0])
        self.convolution = uniform(keys[1], (taps, 3 * width), -(taps**-0.5), taps**-0.5)
        self.beta = eqx.nn.Linear(width, heads, use_bias=False, key=keys[2])
        self.decay = eqx.nn.Linear(width, heads, use_bias=False, key=keys[3])
        self.A_log = jnp.log(uniform(keys[4], heads, 1.0, 16.0))
        dt = jnp.exp(uniform(keys[5], heads, jnp.log(0.001), jnp.log(0.1)))  # a head at first keeps exp(-A dt) a step
        self.dt_bias = jnp.log(jnp.expm1(dt))  # softplus(dt_bias) = dt
        self.gate = eqx.nn.Linear(width, width, use_bias=False, key=keys[6])
        self.norm = jnp.ones(width // heads)
        self.out = eqx.nn.Linear(width, width, use_bias=False, key=keys[7])
        self.heads = heads

    def __call__(
        self, x: jax.Array, state: tuple[jax.Array, jax.Array] | None, how: Fields | None = None
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """`x [B, T, width]` and two states -> the same after these tokens. `how=None` lets the library choose.

        The states are the convolution's last inputs `[B, taps - 1, 3 * width]` and the recurrence's `[B, H, K, V]`.
        """
        inputs, memory = state or (None, None)
        qkv, inputs = causal_conv1d(
            each(self.qkv, x), self.convolution, initial_state=inputs, activation="silu", return_state=True
        )
        q, k, v = (by_head(y, self.heads) for y in jnp.split(qkv, 3, axis=-1))  # [B, T, H, K]
        beta = jax.nn.sigmoid(each(self.beta, x))  # [B, T, H]
        g = -jnp.exp(self.A_log) * jax.nn.softplus(each(self.decay, x) + self.dt_bias)  # [B, T, H]
        cfg = None if how is None else GatedDeltaRuleConfig(**how)
        o, memory = gated_delta_rule(q, k, v, beta, g, initial_state=memory, use_qk_l2norm=True, return_state=True, cfg=cfg)
        o = rms_norm(o) * self.norm * jax.nn.silu(by_head(each(self.gate, x), self.heads))  # [B, T, H, V]
        return each(self.out, o.reshape(x.shape)), (inputs, memory)


# --8<-- [end:delta]


def each(layer: eqx.nn.Linear, x: jax.Array) -> jax.Array:
    """A linear layer on the last axis."""
    y = x @ layer.weight.T
    return y if layer.bias is None else y + layer.bias


def by_head(x: jax.Array, heads: int) -> jax.Array:
    """`[B, T, H * K]` as `[B, T, H, K]`."""
    return x.reshape(*x.shape[:2], heads, -1)


def rms_norm(x: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)
