"""Direct softmax attention: all scores in memory, differentiated by JAX (in both modes)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from ejkernel.kernels._attention.logits import (
    cut_bias,
    drop,
    finish,
    flat_rows,
    keep_mask,
    product,
    scaled_query,
    sum_dtype,
    whole,
)
from ejkernel.kernels._attention.problem import AttentionProblem


@jax.custom_jvp
def softmax(x: Float[Array, "*rows S"], sink: Float[Array, "*rows"]) -> Float[Array, "*rows S"]:
    """exp(x) / (sum of exp(x) + exp(sink)) in x's dtype, summed in the sink's; 0 where all of it is -inf.

    With its own derivative, so that only the result is kept for the gradient, and a row of -inf has a gradient of 0.
    """
    return _softmax(x, sink)[0]


def _softmax(x: Array, sink: Array) -> tuple[Array, Array]:
    """The weights, and the sink's own part of the softmax."""
    top = jnp.maximum(x.max(-1, initial=-jnp.inf).astype(sink.dtype), sink)
    # -inf - -inf would be NaN where nothing is attended to.
    top = jnp.where(top == -jnp.inf, 0, top)
    e = jnp.exp(x - top[..., None].astype(x.dtype))
    e_sink = jnp.exp(sink - top)
    total = e.sum(-1, dtype=sink.dtype) + e_sink
    share = 1 / jnp.where(total == 0, 1, total)
    return e * share[..., None].astype(x.dtype), e_sink * share


@softmax.defjvp
def _softmax_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    (x, sink), (dx, dsink) = primals, tangents
    weights, sink_weight = _softmax(x, sink)
    mean = (weights * dx).sum(-1, dtype=sink.dtype) + sink_weight * dsink
    # Not weights * (dx - mean): mapped by vmap, jaxlib 0.10.2 makes a CPU kernel of it that is wrong beyond 2^15 scores.
    return weights, weights * dx - weights * mean[..., None].astype(x.dtype)


def grouped_weights(problem: AttentionProblem) -> Float[Array, "B Hkv G T S"]:
    """The weights after dropout, in the softmax's dtype; a row that attends to nothing is 0."""
    tile, sums = whole(problem), sum_dtype(problem)
    scores = product(problem, "bhgqd,bkhd->bhgqk", scaled_query(problem), problem.key)
    x = finish(problem, scores, cut_bias(problem, tile), keep_mask(problem, tile))  # [B, Hkv, G, T, S]
    sinks = jnp.full((problem.heads,), -jnp.inf) if problem.sinks is None else problem.sinks
    sinks = jnp.broadcast_to(sinks.astype(sums).reshape(problem.kv_heads, problem.groups, 1), x.shape[:-1])
    return drop(problem, softmax(x, sinks), tile)


def direct_output(problem: AttentionProblem) -> Float[Array, "B T H V"]:
    """The output in the compute dtype."""
    output = product(problem, "bhgqk,bkhv->bhgqv", grouped_weights(problem), problem.value)
    return flat_rows(problem, output).astype(problem.dtype)


def direct_weights(problem: AttentionProblem) -> Float[Array, "B H T S"]:
    """The weights in the compute dtype."""
    weights = grouped_weights(problem)
    return weights.reshape(problem.batch, problem.heads, problem.q_len, problem.kv_len).astype(problem.dtype)
