"""What cuDNN's fused attention covers of the operation, and on which GPU."""

from __future__ import annotations

import jax.numpy as jnp

from ejkernel._device import Device
from ejkernel.kernels._attention import AttentionProblem

# A mask becomes a bias [b, h, T, S]; beyond this it would cost more memory than a fused kernel is there to save.
MASK_BYTES = 1 << 30
# Segments become rows of their own, as long as the longest; beyond this many times the tokens, a mask is cheaper.
PACKING_WASTE = 4


def why_not(problem: AttentionProblem) -> str | None:
    """The reason why cuDNN cannot take this call; None when it can. Looks at shapes and dtypes only."""
    return _device(problem.device) or _operands(problem) or _options(problem) or _window(problem) or _planes(problem)


def is_packed(problem: AttentionProblem) -> bool:
    """Whether segments go by sequence lengths, each a row of its own, rather than by a mask."""
    packing = problem.packing
    # With a window, a segment of more queries than keys has rows without a key, which lengths do not tell.
    if packing is None or problem.bias is not None or problem.mask is not None or problem.left is not None:
        return False
    tokens = problem.batch * max(problem.q_len, problem.kv_len)
    return max(packing.q_rows.size, packing.kv_rows.size) <= PACKING_WASTE * tokens


def needs_mask(problem: AttentionProblem) -> bool:
    """Whether something other than bounds on indices masks: cuDNN takes that as a bias of -inf."""
    segments = problem.q_segment_ids is not None and not is_packed(problem)
    return problem.mask is not None or segments or (problem.q_positions is not None and not is_packed(problem))


def padding_is_seen(problem: AttentionProblem) -> bool:
    """Whether some query would see a key after the last one; causality hides it from all when there are enough keys."""
    return problem.right != 0 or problem.q_len > problem.kv_len


def plane_shape(problem: AttentionProblem) -> tuple[int, int]:
    """Rows and heads of the mask that stands for everything `needs_mask` is about."""
    parts = [x.shape[:2] for x in (problem.mask,) if x is not None]
    leaves = (problem.q_segment_ids, problem.kv_segment_ids, problem.q_positions, problem.kv_positions)
    parts += [(x.shape[0], 1) for x in leaves if x is not None]
    return max(b for b, _ in parts), max(h for _, h in parts)


def _device(device: Device) -> str | None:
    if device.capability is None:
        return f"cuDNN needs an NVIDIA GPU; this call computes on {device}"
    if device.capability < 80:
        return f"cuDNN's fused attention needs compute capability 8.0 or newer; {device} has {device.capability / 10}"
    return None


def _operands(problem: AttentionProblem) -> str | None:
    most = 256 if (problem.device.capability or 0) >= 90 else 128
    if problem.dtype not in (jnp.float16, jnp.bfloat16):
        return f"cuDNN computes in float16 and bfloat16, not {problem.dtype}"
    if problem.softmax_dtype != jnp.float32:
        return f"cuDNN's softmax is in float32, not {problem.softmax_dtype}"
    if problem.head_dim != problem.value_dim:
        return f"keys and values must have as many channels; they have {problem.head_dim} and {problem.value_dim}"
    if problem.head_dim % 8 or problem.head_dim > most:
        return f"the number of channels must be a multiple of 8 up to {most} on this device; it is {problem.head_dim}"
    if 0 in (*problem.query.shape, problem.kv_len):
        return "there is nothing to attend to: an axis has size 0"
    return None


def _options(problem: AttentionProblem) -> str | None:
    if problem.traced_scale is not None:
        return "softmax_scale must be a number that is known while tracing"
    if problem.soft_cap is not None:
        return "logits_soft_cap is not covered"
    if problem.sinks is not None:
        return "attention sinks (softmax_aux) are not covered"
    if problem.dropout_words is not None:
        return "dropout per element, reproducible for a key, is not covered"
    return None


def _window(problem: AttentionProblem) -> str | None:
    if needs_mask(problem) and problem.q_positions is not None:
        return None  # bounds on positions are part of the mask
    if problem.right not in (None, 0):
        return f"a window that reaches {problem.right} keys to the right is not covered (only right=0, or causal)"
    if problem.left is None:
        return None
    if problem.right is None:
        return "a window without a right end is not covered (only right=0, or causal)"
    if problem.bias is not None or needs_mask(problem):
        return "a window together with a bias or a mask is not covered"
    if problem.q_len - 1 - problem.left > problem.kv_len - 1:
        return "some queries have no key within the window"
    if problem.kv_len % 2 and padding_is_seen(problem):
        return "a window over an odd number of keys, fewer than queries, is not covered"
    return None


def _planes(problem: AttentionProblem) -> str | None:
    bias = problem.bias
    if bias is not None and bias.dtype != problem.dtype:
        return f"the bias must be in the compute dtype {problem.dtype}, or it would be rounded; it is {bias.dtype}"
    if bias is None and not needs_mask(problem):
        return None
    if problem.q_len % 2 or problem.kv_len % 2:
        return f"a bias or mask needs even lengths; they are {problem.q_len} and {problem.kv_len}"
    batch, heads = (1, 1) if bias is None else bias.shape[:2]
    if needs_mask(problem):
        batch, heads = (max(size) for size in zip((batch, heads), plane_shape(problem), strict=True))
    heads = heads if heads == 1 else problem.heads
    size = batch * heads * problem.q_len * problem.kv_len * 2
    if needs_mask(problem) and size > MASK_BYTES:
        return f"the mask would take {size >> 20} MiB as a bias, more than {MASK_BYTES >> 20} MiB"
    return None
