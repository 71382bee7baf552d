"""Segment ids, positions and masks as plain arrays: the arithmetic behind `MaskInfo`.

A segment id says which sequence a token belongs to; -1 (any negative id) is padding and attends to nothing:

    mask[b, 0, q, k] = (q_ids[b, q] == kv_ids[b, k]) and q_ids[b, q] >= 0
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

_NOT_SEGMENTS = (
    "this mask cannot be expressed by segment ids: two queries must attend to the same keys or to no common key, the same "
    "in every head (a causal or windowed mask does not). Use the mask itself (get_or_compute_attention_mask)."
)


def segment_ids_to_mask(
    q_segment_ids: Int[Array, "B Q"], kv_segment_ids: Int[Array, "B K"] | None = None
) -> Bool[Array, "B 1 Q K"]:
    """The mask `[B, 1, Q, K]` of pairs in the same segment; `kv_segment_ids` defaults to the queries' ids.

    Example:
        >>> segment_ids_to_mask(jnp.array([[0, 0, -1]])).astype(int)[0, 0].tolist()
        [[1, 1, 0], [1, 1, 0], [0, 0, 0]]
    """
    kv_segment_ids = q_segment_ids if kv_segment_ids is None else kv_segment_ids
    q, kv = q_segment_ids[:, None, :, None], kv_segment_ids[:, None, None, :]  # [B, 1, Q, 1], [B, 1, 1, K]
    return (q == kv) & (q >= 0)


def segment_ids_to_qkv_masks(
    q_segment_ids: Int[Array, "B Q"], kv_segment_ids: Int[Array, "B K"] | None = None
) -> tuple[Bool[Array, "B Q"], Bool[Array, "B K"], Bool[Array, "B 1 Q K"]]:
    """Which queries are tokens `[B, Q]`, which keys are tokens `[B, K]`, and who attends to whom `[B, 1, Q, K]`.

    Example:
        >>> q_mask, kv_mask, mask = segment_ids_to_qkv_masks(jnp.array([[0, 1, -1]]))
        >>> q_mask.tolist(), mask.shape
        ([[True, True, False]], (1, 1, 3, 3))
    """
    kv_segment_ids = q_segment_ids if kv_segment_ids is None else kv_segment_ids
    return q_segment_ids >= 0, kv_segment_ids >= 0, segment_ids_to_mask(q_segment_ids, kv_segment_ids)


def mask_to_segment_ids(mask: Bool[Array, "B H Q K"]) -> tuple[Int[Array, "B Q"], Int[Array, "B K"]]:
    """Segment ids `([B, Q], [B, K])` of a mask made of blocks: numbered from 0 by first key, -1 where nothing attends.

    Args:
        mask: `[B, H, Q, K]`, or `[B, Q, K]`.

    Raises:
        ValueError: segments cannot express the mask. Under `jit` the values are known only when the program runs: it is
            then the program that fails, with this message.

    Example:
        >>> q_ids, kv_ids = mask_to_segment_ids(jnp.array([[[1, 1, 0], [1, 1, 0], [0, 0, 1]]], bool))
        >>> q_ids.tolist(), kv_ids.tolist()
        ([[0, 0, 1]], [[0, 0, 1]])
    """
    mask = jnp.asarray(mask, bool)
    if mask.ndim not in (3, 4):
        raise ValueError(f"mask must be [B, H, Q, K] or [B, Q, K]; got shape {list(mask.shape)}.")
    mask = mask[:, None] if mask.ndim == 3 else mask
    batch, _, q_len, kv_len = mask.shape
    if 0 in mask.shape:
        return jnp.full((batch, q_len), -1, jnp.int32), jnp.full((batch, kv_len), -1, jnp.int32)
    plane = mask[:, 0]  # [B, Q, K]
    first_key = jnp.where(plane.any(2), jnp.argmax(plane, 2), -1)  # [B, Q]: names the segment for now
    first_query = jnp.argmax(plane, 1)  # [B, K]
    kv_first_key = jnp.where(plane.any(1), jnp.take_along_axis(first_key, first_query, 1), -1)  # [B, K]
    opens = kv_first_key == jnp.arange(kv_len, dtype=kv_first_key.dtype)[None]  # [B, K]: this key is the first of its segment
    number = jnp.cumsum(opens, 1, dtype=jnp.int32) - 1  # [B, K]
    q_ids, kv_ids = (
        jnp.where(name >= 0, jnp.take_along_axis(number, jnp.maximum(name, 0), 1), -1) for name in (first_key, kv_first_key)
    )
    _require(jnp.all(segment_ids_to_mask(q_ids, kv_ids) == mask))
    return q_ids, kv_ids


def segment_positions(segment_ids: Int[Array, "B L"]) -> Int[Array, "B L"]:
    """How many earlier tokens of the same segment there are; 0 for padding.

    Example:
        >>> segment_positions(jnp.array([[3, 3, 5, 5, 5, -1, -1]])).tolist()
        [[0, 1, 0, 1, 2, 0, 0]]
    """
    segment_ids = jnp.asarray(segment_ids)
    index = jnp.broadcast_to(jnp.arange(segment_ids.shape[1], dtype=jnp.int32), segment_ids.shape)
    order = jnp.argsort(segment_ids, axis=1, stable=True)  # [B, L]: tokens of a segment together, in their order
    grouped = jnp.take_along_axis(segment_ids, order, 1)
    opens = jnp.concatenate([jnp.ones_like(grouped[:, :1], bool), grouped[:, 1:] != grouped[:, :-1]], 1)
    start = jax.lax.cummax(jnp.where(opens, index, 0), axis=1)
    back = jnp.argsort(order, axis=1)
    return jnp.where(segment_ids >= 0, jnp.take_along_axis(index - start, back, 1), 0)


def _require(expressible: Bool[Array, ""]) -> None:
    """ValueError unless true: now when the value is known, and from within the running program when it is traced."""

    def check(value: object) -> None:
        if not bool(value):
            raise ValueError(_NOT_SEGMENTS)

    if isinstance(expressible, jax.core.Tracer):
        jax.debug.callback(check, expressible)
    else:
        check(expressible)
