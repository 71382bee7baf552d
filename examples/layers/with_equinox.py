"""The blocks in Equinox. Weights are kept in float32 and cast to `dtype` where they are used.

block = Block("gla", width=256, heads=4, key=jax.random.key(0))
x, _ = block(x)                          # x [B, T, width]
x, state = block(x, block.start(B, 500)) # a prompt; softmax attention sees at most 500 tokens then, the others any number
x, state = block(x1, state)              # decoding: the same call, one token, and the state that came before
x, _ = block(row, cu_seqlens=offsets)    # packed documents in one row [1, tokens, width]
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

from ejkernel import causal_conv1d, gated_delta_rule, gla_attention
from examples.layers.parts import Cache, Memory, by_head, causal_attention, check_sizes, empty_cache, log_decay_of, rms_norm

Array = jax.Array


# --8<-- [start:gla]
class Linear(eqx.Module):
    """x W + b on the last axis, in x's dtype."""

    weight: Array  # [inputs, outputs]
    bias: Array | None

    def __init__(self, inputs: int, outputs: int, bias: bool = False, *, key: Array):
        self.weight = jax.random.normal(key, (inputs, outputs)) * inputs**-0.5
        self.bias = jnp.zeros(outputs) if bias else None

    def __call__(self, x: Array) -> Array:
        y = x @ self.weight.astype(x.dtype)
        return y if self.bias is None else y + self.bias.astype(x.dtype)


class GatedLinearAttention(eqx.Module):
    """Gated linear attention with one log decay for each key channel, after a short convolution."""

    qkv: Linear
    convolution: Array  # [taps, 3 * width]
    decay_down: Linear
    decay_up: Linear
    gate: Linear
    norm: Array  # [V]
    out: Linear
    heads: int = eqx.field(static=True)

    def __init__(self, width: int, heads: int, taps: int = 4, rank: int = 16, *, key: Array):
        keys = jax.random.split(key, 6)
        self.qkv = Linear(width, 3 * width, key=keys[0])
        self.convolution = jax.random.normal(keys[1], (taps, 3 * width)) * taps**-0.5
        self.decay_down = Linear(width, rank, key=keys[2])
        self.decay_up = Linear(rank, width, bias=True, key=keys[3])
        self.gate = Linear(width, width, key=keys[4])
        self.norm = jnp.ones(width // heads)
        self.out = Linear(width, width, key=keys[5])
        self.heads = heads

    def __call__(self, x: Array, memory: Memory | None = None, cu_seqlens: Array | None = None) -> tuple[Array, Memory]:
        inputs, state = memory or (None, None)
        qkv, inputs = causal_conv1d(
            self.qkv(x), self.convolution, None, inputs, cu_seqlens, activation="silu", return_state=True
        )
        q, k, v = (by_head(y, self.heads) for y in jnp.split(qkv, 3, axis=-1))  # [B, T, H, K]
        g = by_head(log_decay_of(self.decay_up(self.decay_down(x))), self.heads)  # [B, T, H, K]
        o, state = gla_attention(q, k, v, g, initial_state=state, cu_seqlens=cu_seqlens, return_state=True)
        o = rms_norm(o, self.norm) * jax.nn.silu(by_head(self.gate(x), self.heads))  # [B, T, H, V]
        return self.out(o.reshape(x.shape)), Memory(inputs, state)

    def start(self, batch: int, capacity: int, dtype: Any) -> Memory:
        """The memory of nothing; it has one size, whatever is to come."""
        taps, channels = self.convolution.shape
        size = channels // 3 // self.heads
        return Memory(jnp.zeros((batch, taps - 1, channels), dtype), jnp.zeros((batch, self.heads, size, size)))


# --8<-- [end:gla]


# --8<-- [start:delta]
class GatedDeltaNet(eqx.Module):
    """The gated delta rule: a key's old value is replaced, to the part beta; one log decay for each head."""

    qkv: Linear
    convolution: Array  # [taps, 3 * width]
    beta: Linear
    decay: Linear
    A_log: Array  # [H]
    dt_bias: Array  # [H]
    gate: Linear
    norm: Array  # [V]
    out: Linear
    heads: int = eqx.field(static=True)

    def __init__(self, width: int, heads: int, taps: int = 4, *, key: Array):
        keys = jax.random.split(key, 8)
        self.qkv = Linear(width, 3 * width, key=keys[0])
        self.convolution = jax.random.normal(keys[1], (taps, 3 * width)) * taps**-0.5
        self.beta = Linear(width, heads, key=keys[2])
        self.decay = Linear(width, heads, key=keys[3])
        self.A_log = jnp.log(jax.random.uniform(keys[4], (heads,), minval=1.0, maxval=16.0))
        dt = jnp.exp(jax.random.uniform(keys[5], (heads,), minval=jnp.log(0.001), maxval=jnp.log(0.1)))
        self.dt_bias = jnp.log(jnp.expm1(dt))  # softplus(dt_bias) = dt: a head at first keeps exp(-A dt) a step
        self.gate = Linear(width, width, key=keys[6])
        self.norm = jnp.ones(width // heads)
        self.out = Linear(width, width, key=keys[7])
        self.heads = heads

    def __call__(self, x: Array, memory: Memory | None = None, cu_seqlens: Array | None = None) -> tuple[Array, Memory]:
        inputs, state = memory or (None, None)
        qkv, inputs = causal_conv1d(
            self.qkv(x), self.convolution, None, inputs, cu_seqlens, activation="silu", return_state=True
        )
        q, k, v = (by_head(y, self.heads) for y in jnp.split(qkv, 3, axis=-1))  # [B, T, H, K]
        beta = jax.nn.sigmoid(self.beta(x))  # [B, T, H]
        g = -jnp.exp(self.A_log) * jax.nn.softplus(self.decay(x).astype(jnp.float32) + self.dt_bias)  # [B, T, H]
        o, state = gated_delta_rule(q, k, v, beta, g, state, cu_seqlens, use_qk_l2norm=True, return_state=True)
        o = rms_norm(o, self.norm) * jax.nn.silu(by_head(self.gate(x), self.heads))  # [B, T, H, V]
        return self.out(o.reshape(x.shape)), Memory(inputs, state)

    start = GatedLinearAttention.start


# --8<-- [end:delta]


class SoftmaxAttention(eqx.Module):
    """Causal softmax attention with grouped heads, normalised queries and keys, and rotary positions."""

    query: Linear
    key_value: Linear
    out: Linear
    heads: int = eqx.field(static=True)
    kv_heads: int = eqx.field(static=True)

    def __init__(self, width: int, heads: int, kv_heads: int | None = None, *, key: Array):
        keys = jax.random.split(key, 3)
        self.heads, self.kv_heads = heads, kv_heads or heads
        self.query = Linear(width, width, key=keys[0])
        self.key_value = Linear(width, 2 * width // heads * self.kv_heads, key=keys[1])
        self.out = Linear(width, width, key=keys[2])

    def __call__(self, x: Array, cache: Cache | None = None, cu_seqlens: Array | None = None) -> tuple[Array, Cache | None]:
        q = by_head(self.query(x), self.heads)  # [B, T, H, D]
        k, v = (by_head(y, self.kv_heads) for y in jnp.split(self.key_value(x), 2, axis=-1))  # [B, T, Hkv, D]
        o, cache = causal_attention(rms_norm(q), rms_norm(k), v, cache, cu_seqlens)
        return self.out(o.reshape(x.shape)), cache

    def start(self, batch: int, capacity: int, dtype: Any) -> Cache:
        """An empty cache for `capacity` tokens."""
        return empty_cache(batch, capacity, self.kv_heads, self.query.weight.shape[1] // self.heads, dtype)


MIXERS: dict[str, Any] = {"gla": GatedLinearAttention, "delta": GatedDeltaNet, "softmax": SoftmaxAttention}


class Block(eqx.Module):
    """Mixing of tokens, then a gated feed-forward layer, each on the normed input and added to it."""

    mixer_norm: Array
    mixer: Any
    mlp_norm: Array
    up: Linear
    down: Linear
    dtype: Any = eqx.field(static=True)

    def __init__(self, mixer: str, width: int, heads: int, dtype: Any = jnp.float32, *, key: Array):
        check_sizes(mixer, MIXERS, width, heads)
        keys = jax.random.split(key, 3)
        self.mixer_norm, self.mlp_norm = jnp.ones(width), jnp.ones(width)
        self.mixer = MIXERS[mixer](width, heads, key=keys[0])
        self.up = Linear(width, 4 * width, key=keys[1])
        self.down = Linear(2 * width, width, key=keys[2])
        self.dtype = dtype

    def __call__(self, x: Array, state: Any = None, cu_seqlens: Array | None = None) -> tuple[Array, Any]:
        """`x [B, T, width]`, what is known of the past and, where documents are packed, their offsets."""
        mixed, state = self.mixer(rms_norm(x, self.mixer_norm).astype(self.dtype), state, cu_seqlens)
        x = x + mixed.astype(x.dtype)
        gate, up = jnp.split(self.up(rms_norm(x, self.mlp_norm).astype(self.dtype)), 2, axis=-1)
        return x + self.down(jax.nn.silu(gate) * up).astype(x.dtype), state

    def start(self, batch: int, capacity: int = 0) -> Any:
        """The state before the first token; `capacity`: the most tokens to come, which softmax attention must know."""
        return self.mixer.start(batch, capacity, self.dtype)
