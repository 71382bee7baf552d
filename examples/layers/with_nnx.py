"""The blocks in Flax NNX. Weights are kept in float32 (`param_dtype`) and cast to `dtype` where they are used.

block = Block("gla", width=256, heads=4, rngs=nnx.Rngs(0))
x, _ = block(x)                          # x [B, T, width]
x, state = block(x, block.start(B, 500)) # a prompt; softmax attention sees at most 500 tokens then, the others any number
x, state = block(x1, state)              # decoding: the same call, one token, and the state that came before
x, _ = block(row, cu_seqlens=offsets)    # packed documents in one row [1, tokens, width]
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from ejkernel import causal_conv1d, gated_delta_rule, gla_attention
from examples.layers.parts import Cache, Memory, by_head, causal_attention, check_sizes, empty_cache, log_decay_of, rms_norm

Array = jax.Array


# --8<-- [start:gla]
def linear(inputs: int, outputs: int, dtype: Any, rngs: nnx.Rngs, bias: bool = False) -> nnx.Linear:
    return nnx.Linear(inputs, outputs, use_bias=bias, dtype=dtype, param_dtype=jnp.float32, rngs=rngs)


class GatedLinearAttention(nnx.Module):
    """Gated linear attention with one log decay for each key channel, after a short convolution."""

    def __init__(self, width: int, heads: int, taps: int = 4, rank: int = 16, *, dtype: Any = jnp.float32, rngs: nnx.Rngs):
        self.qkv = linear(width, 3 * width, dtype, rngs)
        self.convolution = nnx.Param(rngs.params.normal((taps, 3 * width)) * taps**-0.5)
        self.decay_down = linear(width, rank, dtype, rngs)
        self.decay_up = linear(rank, width, dtype, rngs, bias=True)
        self.gate = linear(width, width, dtype, rngs)
        self.norm = nnx.Param(jnp.ones(width // heads))
        self.out = linear(width, width, dtype, rngs)
        self.heads = heads

    def __call__(self, x: Array, memory: Memory | None = None, cu_seqlens: Array | None = None) -> tuple[Array, Memory]:
        inputs, state = memory or (None, None)
        qkv, inputs = causal_conv1d(
            self.qkv(x), self.convolution[...], None, inputs, cu_seqlens, activation="silu", return_state=True
        )
        q, k, v = (by_head(y, self.heads) for y in jnp.split(qkv, 3, axis=-1))  # [B, T, H, K]
        g = by_head(log_decay_of(self.decay_up(self.decay_down(x))), self.heads)  # [B, T, H, K]
        o, state = gla_attention(q, k, v, g, initial_state=state, cu_seqlens=cu_seqlens, return_state=True)
        o = rms_norm(o, self.norm[...]) * jax.nn.silu(by_head(self.gate(x), self.heads))  # [B, T, H, V]
        return self.out(o.reshape(x.shape)), Memory(inputs, state)

    def start(self, batch: int, capacity: int, dtype: Any) -> Memory:
        """The memory of nothing; it has one size, whatever is to come."""
        taps, channels = self.convolution.shape
        size = channels // 3 // self.heads
        return Memory(jnp.zeros((batch, taps - 1, channels), dtype), jnp.zeros((batch, self.heads, size, size)))


# --8<-- [end:gla]


# --8<-- [start:delta]
class GatedDeltaNet(nnx.Module):
    """The gated delta rule: a key's old value is replaced, to the part beta; one log decay for each head."""

    def __init__(self, width: int, heads: int, taps: int = 4, *, dtype: Any = jnp.float32, rngs: nnx.Rngs):
        self.qkv = linear(width, 3 * width, dtype, rngs)
        self.convolution = nnx.Param(rngs.params.normal((taps, 3 * width)) * taps**-0.5)
        self.beta = linear(width, heads, dtype, rngs)
        self.decay = linear(width, heads, dtype, rngs)
        self.A_log = nnx.Param(jnp.log(rngs.params.uniform((heads,), minval=1.0, maxval=16.0)))
        dt = jnp.exp(rngs.params.uniform((heads,), minval=jnp.log(0.001), maxval=jnp.log(0.1)))
        self.dt_bias = nnx.Param(jnp.log(jnp.expm1(dt)))  # softplus(dt_bias) = dt: a head at first keeps exp(-A dt) a step
        self.gate = linear(width, width, dtype, rngs)
        self.norm = nnx.Param(jnp.ones(width // heads))
        self.out = linear(width, width, dtype, rngs)
        self.heads = heads

    def __call__(self, x: Array, memory: Memory | None = None, cu_seqlens: Array | None = None) -> tuple[Array, Memory]:
        inputs, state = memory or (None, None)
        qkv, inputs = causal_conv1d(
            self.qkv(x), self.convolution[...], None, inputs, cu_seqlens, activation="silu", return_state=True
        )
        q, k, v = (by_head(y, self.heads) for y in jnp.split(qkv, 3, axis=-1))  # [B, T, H, K]
        beta = jax.nn.sigmoid(self.beta(x))  # [B, T, H]
        step = jax.nn.softplus(self.decay(x).astype(jnp.float32) + self.dt_bias[...])
        g = -jnp.exp(self.A_log[...]) * step  # [B, T, H]
        o, state = gated_delta_rule(q, k, v, beta, g, state, cu_seqlens, use_qk_l2norm=True, return_state=True)
        o = rms_norm(o, self.norm[...]) * jax.nn.silu(by_head(self.gate(x), self.heads))  # [B, T, H, V]
        return self.out(o.reshape(x.shape)), Memory(inputs, state)

    start = GatedLinearAttention.start


# --8<-- [end:delta]


class SoftmaxAttention(nnx.Module):
    """Causal softmax attention with grouped heads, normalised queries and keys, and rotary positions."""

    def __init__(self, width: int, heads: int, kv_heads: int | None = None, *, dtype: Any = jnp.float32, rngs: nnx.Rngs):
        self.heads, self.kv_heads = heads, kv_heads or heads
        self.query = linear(width, width, dtype, rngs)
        self.key_value = linear(width, 2 * width // heads * self.kv_heads, dtype, rngs)
        self.out = linear(width, width, dtype, rngs)

    def __call__(self, x: Array, cache: Cache | None = None, cu_seqlens: Array | None = None) -> tuple[Array, Cache | None]:
        q = by_head(self.query(x), self.heads)  # [B, T, H, D]
        k, v = (by_head(y, self.kv_heads) for y in jnp.split(self.key_value(x), 2, axis=-1))  # [B, T, Hkv, D]
        o, cache = causal_attention(rms_norm(q), rms_norm(k), v, cache, cu_seqlens)
        return self.out(o.reshape(x.shape)), cache

    def start(self, batch: int, capacity: int, dtype: Any) -> Cache:
        """An empty cache for `capacity` tokens."""
        return empty_cache(batch, capacity, self.kv_heads, self.query.out_features // self.heads, dtype)


MIXERS: dict[str, Any] = {"gla": GatedLinearAttention, "delta": GatedDeltaNet, "softmax": SoftmaxAttention}


class Block(nnx.Module):
    """Mixing of tokens, then a gated feed-forward layer, each on the normed input and added to it."""

    def __init__(self, mixer: str, width: int, heads: int, dtype: Any = jnp.float32, *, rngs: nnx.Rngs):
        check_sizes(mixer, MIXERS, width, heads)
        self.mixer_norm, self.mlp_norm = nnx.Param(jnp.ones(width)), nnx.Param(jnp.ones(width))
        self.mixer = MIXERS[mixer](width, heads, dtype=dtype, rngs=rngs)
        self.up = linear(width, 4 * width, dtype, rngs)
        self.down = linear(2 * width, width, dtype, rngs)
        self.dtype = dtype

    def __call__(self, x: Array, state: Any = None, cu_seqlens: Array | None = None) -> tuple[Array, Any]:
        """`x [B, T, width]`, what is known of the past and, where documents are packed, their offsets."""
        mixed, state = self.mixer(rms_norm(x, self.mixer_norm[...]).astype(self.dtype), state, cu_seqlens)
        x = x + mixed.astype(x.dtype)
        gate, up = jnp.split(self.up(rms_norm(x, self.mlp_norm[...]).astype(self.dtype)), 2, axis=-1)
        return x + self.down(jax.nn.silu(gate) * up).astype(x.dtype), state

    def start(self, batch: int, capacity: int = 0) -> Any:
        """The state before the first token; `capacity`: the most tokens to come, which softmax attention must know."""
        return self.mixer.start(batch, capacity, self.dtype)
