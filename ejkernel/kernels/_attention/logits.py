"""Logits of a tile: queries `[start_q, start_q + q)` against keys `[start_k, start_k + k)`.

    scores = scale * q . k                                                                  # [B, Hkv, G, q, k]
    logits = soft_cap * tanh(scores / soft_cap) + bias, -inf where masked

The direct schedule is one tile that covers everything; the blockwise one goes over tiles. Heads come first and are
`[Hkv, G]` throughout: G query heads share a key head, and keys and values are never repeated.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from ejkernel._varying import vary, varying_axes
from ejkernel.kernels._attention.arguments import accumulation_dtype
from ejkernel.kernels._attention.dropout import kept
from ejkernel.kernels._attention.problem import AttentionProblem

Index = int | Array


class Tile(NamedTuple):
    """Where a tile starts and how large it is; `kv_end` is where keys end and padding begins."""

    start_q: Index
    start_k: Index
    size_q: int
    size_k: int
    kv_end: int


def whole(problem: AttentionProblem) -> Tile:
    """The one tile that covers the problem."""
    return Tile(0, 0, problem.q_len, problem.kv_len, problem.kv_len)


def precision(problem: AttentionProblem) -> lax.Precision | None:
    """Full precision for wide inputs; half-precision inputs lose nothing in the device's default products of floats."""
    return lax.Precision.HIGHEST if problem.dtype in (jnp.float32, jnp.float64) else None


def product(problem: AttentionProblem, spec: str, a: Array, b: Array) -> Array:
    """`einsum` of two arrays in the accumulation dtype."""
    wide = problem.accumulation_dtype
    return jnp.einsum(spec, a.astype(wide), b.astype(wide), precision=precision(problem))


def cut(x: Array, axis: int, start: Index, size: int) -> Array:
    """The part of an axis that a tile covers; an axis of size 1 does not vary and stays whole."""
    if x.shape[axis] in (1, size):
        return x
    return lax.dynamic_slice_in_dim(x, start, size, axis)


def cut_plane(problem: AttentionProblem, plane: Array, tile: Tile) -> Array:
    """A bias or mask `[b, h, t, s]` as `[b, h, g, q, k]` on a tile."""
    return cut(cut(problem.grouped(plane), 3, tile.start_q, tile.size_q), 4, tile.start_k, tile.size_k)


def grouped_rows(problem: AttentionProblem, x: Float[Array, "B T H D"]) -> Float[Array, "B Hkv G T D"]:
    """Queries, outputs or their gradients, heads first."""
    return jnp.moveaxis(x.reshape(*x.shape[:2], problem.kv_heads, problem.groups, x.shape[3]), 1, 3)


def flat_rows(problem: AttentionProblem, x: Float[Array, "B Hkv G T D"]) -> Float[Array, "B T H D"]:
    """The way back."""
    x = jnp.moveaxis(x, 3, 1)
    return x.reshape(*x.shape[:2], problem.heads, x.shape[4])


def scaled_query(problem: AttentionProblem) -> Float[Array, "B Hkv G T D"]:
    """The queries times the scale, heads first, in the accumulation dtype."""
    scale = problem.scale if problem.traced_scale is None else problem.traced_scale
    wide = problem.accumulation_dtype
    return grouped_rows(problem, problem.query).astype(wide) * jnp.asarray(scale, wide)


def finish(
    problem: AttentionProblem,
    scores: Float[Array, "B Hkv G q k"],
    bias: Float[Array, "b h g q k"] | None,
    keep: Bool[Array, "b h g q k"] | None,
) -> Float[Array, "B Hkv G q k"]:
    """Logits from scores, in the softmax's dtype."""
    if problem.soft_cap is not None:
        scores = problem.soft_cap * jnp.tanh(scores / problem.soft_cap)
    if bias is not None:
        scores = scores + bias.astype(scores.dtype)
    if keep is not None:
        scores = jnp.where(keep, scores, -jnp.inf)
    return scores.astype(problem.softmax_dtype)


def cut_bias(problem: AttentionProblem, tile: Tile) -> Float[Array, "b h g q k"] | None:
    """The bias on a tile."""
    return None if problem.bias is None else cut_plane(problem, problem.bias, tile)


def keep_mask(problem: AttentionProblem, tile: Tile) -> Bool[Array, "b h g q k"] | None:
    """Which pairs of a tile attend; None: all of them."""
    parts = []
    if problem.left is not None or problem.right is not None:
        distance = (
            _positions(problem.kv_positions, tile.start_k, tile.size_k)[..., None, :]
            - _positions(problem.q_positions, tile.start_q, tile.size_q)[..., :, None]
        )  # [b, 1, 1, q, k]
        parts += [] if problem.left is None else [distance >= -problem.left]
        parts += [] if problem.right is None else [distance <= problem.right]
    if problem.mask is not None:
        parts.append(cut_plane(problem, problem.mask, tile))
    if problem.q_segment_ids is not None and problem.kv_segment_ids is not None:
        q = cut(problem.q_segment_ids, 1, tile.start_q, tile.size_q)[:, None, None, :, None]
        kv = cut(problem.kv_segment_ids, 1, tile.start_k, tile.size_k)[:, None, None, None, :]
        parts.append((q == kv) & (q >= 0))
    if problem.kv_len != tile.kv_end:
        parts.append((tile.start_k + jnp.arange(tile.size_k, dtype=jnp.int32) < tile.kv_end)[None, None, None, None, :])
    keep = None
    for part in parts:
        keep = part if keep is None else keep & part
    return keep


def _positions(given: Array | None, start: Index, size: int) -> Array:
    """`[b, 1, 1, size]`."""
    if given is None:
        return (start + jnp.arange(size, dtype=jnp.int32))[None, None, None, :]
    return cut(given, 1, start, size)[:, None, None, :]


def drop(problem: AttentionProblem, weights: Float[Array, "B Hkv G q k"], tile: Tile) -> Float[Array, "B Hkv G q k"]:
    """Weights, or their gradient, after dropout: kept ones grow by `1 / (1 - prob)`, the others are 0."""
    if problem.dropout_words is None:
        return weights
    words = cut(problem.grouped(problem.dropout_words), 3, tile.start_q, tile.size_q)  # [B, Hkv, G, q, 2]
    keep = kept(words, tile.start_k + jnp.arange(tile.size_k, dtype=jnp.int32), problem.dropout_prob)
    return jnp.where(keep, weights / (1.0 - problem.dropout_prob), 0.0).astype(weights.dtype)


def sum_dtype(problem: AttentionProblem) -> Any:
    """The dtype of the softmax's maximum and sums."""
    return accumulation_dtype(problem.softmax_dtype)


def alike_varying(problem: AttentionProblem) -> AttentionProblem:
    """The problem with every array marked as varying over the mesh axes that any of them varies over.

    Inside `shard_map` a replicated bias may meet sharded queries. Loops and custom gradients need one kind of array; the
    gradient of this marking is the sum over the mesh that a replicated input's gradient needs.
    """
    leaves = [leaf for leaf in vars(problem).values() if isinstance(leaf, Array)]
    axes = varying_axes(*leaves)
    changed: dict[str, Any] = {
        name: vary(leaf, axes) for name, leaf in vars(problem).items() if isinstance(leaf, Array) and axes - varying_axes(leaf)
    }
    return dataclasses.replace(problem, **changed) if changed else problem
