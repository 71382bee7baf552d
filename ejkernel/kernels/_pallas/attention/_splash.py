"""Rows of the batch through JAX's splash attention kernel, forward and backward.

The kernel takes [H, T, D], whole blocks and scaled queries. Here lengths are padded: queries beyond the end are cut off
afterwards, keys beyond it are a segment of their own that no query is in, unless causality hides them anyway.

A row without any key is 0 with gradient 0. The kernel would average over masked values there, or divide by 0 where it skips
all blocks of the row, so such rows are set afterwards.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import config as jax_settings
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask_info as blocks
from jaxtyping import Array, Bool, Float

from ejkernel._varying import vary, varying_axes
from ejkernel.kernels._pallas.attention._plan import Plan, padded

Arrays = dict[str, Any]
# Ids of padding that differ: a negative id attends to nothing.
NO_QUERY, NO_KEY = -2, -1


def forward(plan: Plan, arrays: Arrays, wide: bool = False) -> tuple[Float[Array, "B T H V"], Float[Array, "B H T"]]:
    """(output, log of each row's sum of exponentials).

    Args:
        arrays: scaled query `[B, T, H, D]`, key, value; and `q_ids` `[B, T]`, `kv_ids` `[B, S]`, `sinks` `[B, H]` if any.
        wide: the output in float32. The kernel gives it in the dtype of its queries, so these and the keys are handed over in
            float32 then: their numbers, and so the products, stay the same.
    """
    if wide:
        arrays = {**arrays, **{name: arrays[name].astype(jnp.float32) for name in ("query", "key")}}
    q_len, kv_len = arrays["query"].shape[1], arrays["key"].shape[1]
    kernel = _kernel(plan, arrays["query"].shape[2], padded(q_len, plan.block_q), padded(kv_len, plan.block_k))
    rows = _rows(plan, arrays)
    with _kernels(plan):
        run = lambda row: kernel(row["query"], row["key"], row["value"], row.get("ids"), row.get("sinks"))
        output, (lse,) = jax.vmap(run)(rows)  # [B, H, T', V], [B, H, T']
    output, lse = _varying_alike(arrays, output, lse)
    output, lse = jnp.swapaxes(output[:, :, :q_len], 1, 2), lse[:, :, :q_len]
    if (there := has_key(plan, arrays)) is not None:
        output = jnp.where(there[:, :, None, None], output, 0)
        lse = jnp.where(there[:, None, :], lse, 0.0)  # any number: finite, so that nothing of these rows becomes NaN
    return output, lse


def backward(plan: Plan, arrays: Arrays, output: Array, lse: Array, d_output: Array) -> Arrays:
    """The gradients of query, key, value, and of `sinks` where there are any; those need an output that was not rounded."""
    q_len, kv_len = arrays["query"].shape[1], arrays["key"].shape[1]
    kernel = _kernel(plan, arrays["query"].shape[2], padded(q_len, plan.block_q), padded(kv_len, plan.block_k))
    if (there := has_key(plan, arrays)) is not None:
        d_output = jnp.where(there[:, :, None, None], d_output, 0)
    rows = _rows(plan, arrays)
    rows |= {"output": _heads_first(output, plan.block_q), "d_output": _heads_first(d_output, plan.block_q)}
    rows["lse"] = jnp.pad(lse, ((0, 0), (0, 0), (0, padded(q_len, plan.block_q) - q_len)))

    def pull(row: Arrays) -> tuple[Array, Array, Array]:
        # The sinks are in the sums already; their own gradient is below.
        kept = (row["query"], row["key"], row["value"], row.get("ids"), None, row["output"], row["lse"])
        options = {name: value for name, value in kernel.kwargs.items() if name != "save_residuals"}
        found = splash._splash_attention_bwd(
            save_residuals=False, **options, res=(*kept, kernel.dq_mask_info, kernel.dkv_mask_info), do=row["d_output"]
        )
        return found[3:6]

    with _kernels(plan):
        dq, dk, dv = jax.vmap(pull)(rows)
    dq, dk, dv = _varying_alike(arrays, dq, dk, dv)
    back = lambda x, length: jnp.swapaxes(x[:, :, :length], 1, 2)
    grads = {"query": back(dq, q_len), "key": back(dk, kv_len), "value": back(dv, kv_len)}
    if "sinks" in arrays:
        wide = [x.astype(jnp.float32) for x in (output, d_output)]
        share = jnp.exp(arrays["sinks"][:, :, None] - lse)  # [B, H, T]
        if there is not None:
            share = jnp.where(there[:, None, :], share, 0)
        grads["sinks"] = -jnp.einsum("bht,bthv,bthv->bh", share, *wide, precision="highest")
    return grads


def has_key(plan: Plan, arrays: Arrays) -> Bool[Array, "b T"] | None:
    """Which queries have any key at all; None where all of them do."""
    q_len, kv_len = arrays["query"].shape[1], arrays["key"].shape[1]
    i = np.arange(q_len)[:, None]
    if "q_ids" not in arrays:
        first = 0 if plan.left is None else np.maximum(i - plan.left, 0)  # the row's first and last key
        last = kv_len - 1 if plan.right is None else np.minimum(i + plan.right, kv_len - 1)
        there = np.broadcast_to(first <= last, (q_len, 1))[None, :, 0]
        return None if there.all() else jnp.asarray(there)
    keep = arrays["q_ids"][:, :, None] == arrays["kv_ids"][:, None, :]  # [B, T, S], which XLA sums up without storing it
    j = jax.lax.broadcasted_iota(jnp.int32, (1, q_len, kv_len), 2)
    if plan.left is not None:
        keep &= j >= i - plan.left
    if plan.right is not None:
        keep &= j <= i + plan.right
    return jnp.any(keep, 2)


@contextlib.contextmanager
def _kernels(plan: Plan) -> Iterator[None]:
    """What the kernels leave open: the precision of products, under `shard_map` over which mesh axes their results vary, and
    how wide their integers are.

    Float32 needs all passes; bfloat16 operands know one only. The results vary as the arguments do, which `vary` says
    afterwards; here the question is not asked, since the kernels have no answer. Their integers must have 32 bits, also where
    64 are enabled.
    """
    precision = jax.default_matmul_precision("highest" if plan.precise else "default")
    with precision, jax_settings._check_vma(False), jax.enable_x64(False):
        yield


def _varying_alike(arrays: Arrays, *results: Array) -> list[Array]:
    axes = varying_axes(*arrays.values())
    return [vary(x, axes) for x in results]


def _heads_first(x: Array, block: int) -> Array:
    """[B, L, H, D] as [B, H, L', D], padded to whole blocks."""
    x = jnp.swapaxes(x, 1, 2)
    return jnp.pad(x, ((0, 0), (0, 0), (0, padded(x.shape[2], block) - x.shape[2]), (0, 0)))


def _rows(plan: Plan, arrays: Arrays) -> Arrays:
    """What the kernel takes, for every row of the batch."""
    batch, q_len, kv_len = arrays["query"].shape[0], arrays["query"].shape[1], arrays["key"].shape[1]
    rows: Arrays = {
        "query": _heads_first(arrays["query"], plan.block_q),
        "key": _heads_first(arrays["key"], plan.block_k),
        "value": _heads_first(arrays["value"], plan.block_k),
    }
    more_queries, more_keys = padded(q_len, plan.block_q) - q_len, padded(kv_len, plan.block_k) - kv_len
    q_ids, kv_ids = arrays.get("q_ids"), arrays.get("kv_ids")
    hidden = plan.right is not None and q_len - 1 + plan.right < kv_len
    if q_ids is None and more_keys and not hidden:
        q_ids, kv_ids = jnp.zeros((batch, q_len), jnp.int32), jnp.zeros((batch, kv_len), jnp.int32)
    if q_ids is not None and kv_ids is not None:
        rows["ids"] = splash.SegmentIds(
            jnp.pad(q_ids, ((0, 0), (0, more_queries)), constant_values=NO_QUERY),
            jnp.pad(kv_ids, ((0, 0), (0, more_keys)), constant_values=NO_KEY),
        )
    if "sinks" in arrays:
        rows["sinks"] = arrays["sinks"]
    return rows


@functools.lru_cache(maxsize=64)
def _kernel(plan: Plan, heads: int, q_len: int, kv_len: int) -> Any:
    """The kernel for padded lengths. Which blocks it skips is found by going through the whole mask, once for each length."""
    bounds, shape = (plan.left, plan.right), (q_len, kv_len)
    mask = masks.FullMask(shape) if bounds == (None, None) else masks.LocalMask(shape, bounds, 0)
    q, k = plan.block_q, plan.block_k
    # In NumPy, not by the library's own function: that makes arrays on devices, and where a mesh of other machines' devices is
    # set, as to compile ahead, there are none.
    find = {"downcast_smem_data": True, "head_shards": 1, "q_seq_shards": 1}
    of_heads = masks.MultiHeadMask([mask] * heads)
    forward_blocks, mask_function = blocks.process_mask(of_heads, (q, k), **find)
    key_blocks, _ = blocks.process_mask_dkv(of_heads, (q, k), **find)
    return splash.SplashAttentionKernel(
        forward_blocks,
        forward_blocks,  # the gradient of queries goes through the same ones
        key_blocks,
        block_sizes=splash.BlockSizes(
            block_q=q,
            block_kv=k,
            block_kv_compute=k,
            block_q_dkv=q,
            block_kv_dkv=k,
            block_kv_dkv_compute=k,
            block_q_dq=q,
            block_kv_dq=k,
        ),
        is_mqa=False,
        save_residuals=True,
        mask_value=splash.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=plan.soft_cap,
        residual_checkpoint_name=None,
        mask_function=mask_function,
        interpret=plan.interpret,
    )
