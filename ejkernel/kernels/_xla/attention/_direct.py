"""Direct softmax attention: all scores in memory, differentiated by JAX (in both modes)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ejkernel.kernels._attention.problem import AttentionProblem
from ejkernel.kernels._xla.attention._logits import (
    drop,
    factors,
    grouped_sinks,
    keep_mask,
    logits,
    product,
    sum_dtype,
    whole,
)


def grouped_weights(problem: AttentionProblem) -> Float[Array, "B Hkv G T S"]:
    """The weights after dropout, in the softmax's dtype; a row that attends to nothing is 0."""
    tile, sums = whole(problem), sum_dtype(problem)
    x = logits(problem, factors(problem, tile), keep_mask(problem, tile))  # [B, Hkv, G, T, S]
    top = jax.lax.stop_gradient(x.max(-1, initial=-jnp.inf)).astype(sums)  # [B, Hkv, G, T]
    sinks = grouped_sinks(problem)
    if sinks is not None:
        top = jnp.maximum(top, jax.lax.stop_gradient(sinks.astype(sums))[..., None])
    # -inf - -inf would be NaN where nothing is attended to.
    top = jnp.where(top == -jnp.inf, 0, top)
    e = jnp.exp(x - top[..., None].astype(x.dtype))
    total = e.sum(-1, dtype=sums)
    if sinks is not None:
        total += jnp.exp(sinks.astype(sums)[..., None] - top)
    share = 1 / jnp.where(total == 0, 1, total)
    return drop(problem, e * share[..., None].astype(e.dtype), tile)


def direct_output(problem: AttentionProblem) -> Float[Array, "B T H V"]:
    """The output in the compute dtype."""
    output = product(problem, "bhgqk,bkhv->bqhgv", grouped_weights(problem), problem.value)
    return output.reshape(*problem.query.shape[:3], problem.value_dim).astype(problem.dtype)


def direct_weights(problem: AttentionProblem) -> Float[Array, "B H T S"]:
    """The weights in the compute dtype."""
    weights = grouped_weights(problem)
    return weights.reshape(problem.batch, problem.heads, problem.q_len, problem.kv_len).astype(problem.dtype)
