"""A problem that cuDNN covers, in cuDNN's terms.

Bounds on indices are its causal mask and window. Segments whose ids were known are rows of their own with lengths. Any other
mask is added to the bias, and rows without a key, which cuDNN would average over, are set to 0 afterwards. Odd lengths get one
token of padding, since the gradient takes even ones only.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ejkernel.kernels._attention import AttentionProblem
from ejkernel.kernels._attention.logits import keep_mask, whole
from ejkernel.kernels._cuda.attention._supports import is_packed, needs_mask, padding_is_seen


def cudnn_output(problem: AttentionProblem) -> Float[Array, "B T H V"]:
    """The output in the compute dtype."""
    if is_packed(problem):
        return _packed_output(problem)
    if problem.bias is not None or needs_mask(problem):
        return _biased_output(problem)
    return _plain_output(problem)


def _plain_output(problem: AttentionProblem) -> Float[Array, "B T H V"]:
    causal, window = _bounds(problem)
    lengths = None
    if problem.kv_len % 2 and padding_is_seen(problem):
        lengths = jnp.full((problem.batch,), problem.kv_len, jnp.int32)
    output = jax.nn.dot_product_attention(
        _even(problem.query),
        _even(problem.key),
        _even(problem.value),
        scale=problem.scale,
        is_causal=causal,
        local_window_size=window,
        key_value_seq_lengths=lengths,
        implementation="cudnn",
    )
    return output[:, : problem.q_len]


def _even(x: Float[Array, "B L H D"]) -> Float[Array, "B L H D"]:
    return jnp.pad(x, ((0, 0), (0, x.shape[1] % 2), (0, 0), (0, 0))) if x.shape[1] % 2 else x


def _biased_output(problem: AttentionProblem) -> Float[Array, "B T H V"]:
    causal, window = _bounds(problem)
    mask = _mask(problem) if needs_mask(problem) else None
    output = jax.nn.dot_product_attention(
        problem.query,
        problem.key,
        problem.value,
        bias=None if problem.bias is None else _every_head(problem, problem.bias),
        mask=mask,
        scale=problem.scale,
        is_causal=causal,
        local_window_size=window,
        implementation="cudnn",
    )
    return output if mask is None else jnp.where(_has_key(problem), output, 0)


def _packed_output(problem: AttentionProblem) -> Float[Array, "B T H V"]:
    packing = problem.packing
    assert packing is not None
    causal, window = _bounds(problem)
    output = jax.nn.dot_product_attention(
        packing.unpack(problem.query, packing.q_rows),
        packing.unpack(problem.key, packing.kv_rows),
        packing.unpack(problem.value, packing.kv_rows),
        scale=problem.scale,
        is_causal=causal,
        local_window_size=window,
        query_seq_lengths=packing.q_lengths,
        key_value_seq_lengths=packing.kv_lengths,
        implementation="cudnn",
    )
    return packing.pack(output, problem.query.shape)


def _bounds(problem: AttentionProblem) -> tuple[bool, tuple[int, int] | None]:
    """Whether cuDNN's causal mask applies, and its window; both are part of the mask where positions are compared."""
    if problem.q_positions is not None and not is_packed(problem):
        return False, None
    return problem.right == 0, None if problem.left is None else (problem.left, 0)


def _mask(problem: AttentionProblem) -> Bool[Array, "b h T S"]:
    """Everything that masks, except for bounds on indices, which cuDNN knows itself."""
    if problem.q_positions is None:
        problem = dataclasses.replace(problem, left=None, right=None)
    return _plane(problem)


def _plane(problem: AttentionProblem) -> Bool[Array, "b h T S"]:
    keep = keep_mask(problem, whole(problem))
    assert keep is not None  # needs_mask
    heads = (1, 1) if keep.shape[1:3] == (1, 1) else (problem.kv_heads, problem.groups)
    full = jnp.broadcast_to(keep, (keep.shape[0], *heads, problem.q_len, problem.kv_len))
    return full.reshape(keep.shape[0], heads[0] * heads[1], problem.q_len, problem.kv_len)


def _every_head(problem: AttentionProblem, bias: Float[Array, "b h t s"]) -> Float[Array, "b H T S"]:
    """The bias for every query head, pair by pair, as cuDNN wants it for its gradient; batches may share it."""
    full = jnp.broadcast_to(
        problem.grouped(bias), (bias.shape[0], problem.kv_heads, problem.groups, problem.q_len, problem.kv_len)
    )
    return full.reshape(bias.shape[0], problem.heads, problem.q_len, problem.kv_len)


def _has_key(problem: AttentionProblem) -> Bool[Array, "b T h 1"]:
    """Which queries attend to any key at all."""
    return jnp.swapaxes(_plane(problem).any(3), 1, 2)[..., None]
