"""Softmax attention: one call for every device, with every mask, bias and window."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ejkernel.kernels._attention import AttentionConfig, AttentionImplementation, AttentionProblem
from ejkernel.kernels._registry import Backend, Implementation, Platform, as_platform, kernel_registry
from ejkernel.modules.base import default_executor
from ejkernel.ops import Invocation, Kernel
from ejkernel.types.mask import MaskInfo

__all__ = ["Attention", "AttentionConfig", "attention"]

_LENGTH_AXES = {
    "problem.query": (1,),
    "problem.key": (1,),
    "problem.value": (1,),
    "problem.bias": (2, 3),
    "problem.mask": (2, 3),
    "problem.q_segment_ids": (1,),
    "problem.kv_segment_ids": (1,),
    "problem.q_positions": (1,),
    "problem.kv_positions": (1,),
    "problem.dropout_words": (2,),
}


class Attention(Kernel[AttentionConfig, tuple[jax.Array, jax.Array | None]]):
    """Softmax attention as the executor sees it: solves an `AttentionProblem` on the platform that its config names."""

    op_id = "attention"

    def run(  # type: ignore[override]  # this kernel's own arguments
        self, problem: AttentionProblem, *, platform: str | None = None, cfg: AttentionConfig
    ) -> tuple[jax.Array, jax.Array | None]:
        """`(output, weights)`, the weights None unless `problem.return_weights`."""
        return _implementation(problem, platform, cfg).solve(problem, cfg)

    def heuristic_cfg(self, inv: Invocation) -> AttentionConfig:
        """The choice of the best platform that supports the call; xla for a single query, where cuDNN is slower.

        On an H200 one query over 2048 keys takes 0.056 ms by xla and 0.076 ms by cuDNN.
        """
        problem, platform = inv.arguments["problem"], inv.arguments["platform"]
        if as_platform(platform) is None and problem.query.shape[1] == 1:
            platform = Platform.XLA
        return _function(kernel_registry.select(self.op_id, platform, problem=problem)).heuristic(problem)

    def candidate_cfgs(self, inv: Invocation) -> Iterable[AttentionConfig]:
        """What every platform that supports the call would measure; one that was asked for is alone."""
        problem, asked = inv.arguments["problem"], as_platform(inv.arguments["platform"])
        for entry in kernel_registry.list_implementations(self.op_id):
            if asked in (None, entry.platform) and kernel_registry.refusal(entry, problem) is None:
                yield from _function(entry).candidates(problem)

    def check_cfg(self, inv: Invocation, cfg: AttentionConfig) -> str | None:
        """The reason why the call cannot run with `cfg`."""
        try:
            _implementation(inv.arguments["problem"], inv.arguments["platform"], cfg)
        except ValueError as reason:
            return str(reason)
        return None

    def default_policy(self, backend: str) -> str:
        """Heuristics everywhere: a fused kernel has nothing to choose, and the others' tiles were measured."""
        return "heuristics"

    def length_axes(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Lengths of queries and keys; an axis of size 1 does not vary and is no length."""
        return tuple(axis for axis in _LENGTH_AXES.get(name, ()) if shape[axis] != 1)

    def random_inputs(self, inv: Invocation, key: jax.Array) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """As by default, but with masks that keep everything and full segments: otherwise there is nothing to measure."""
        from ejkernel.ops.inputs import random_arguments  # only tuning needs it

        (problem,), kwargs = random_arguments(inv, key)
        mask, packing = problem.mask, problem.packing
        if mask is not None:
            mask = jnp.ones_like(mask)
        if packing is not None:
            q_lengths = jnp.full_like(packing.q_lengths, packing.q_rows.shape[1])
            kv_lengths = jnp.full_like(packing.kv_lengths, packing.kv_rows.shape[1])
            packing = packing._replace(q_lengths=q_lengths, kv_lengths=kv_lengths)
        return (dataclasses.replace(problem, mask=mask, packing=packing),), kwargs


def _function(entry: Implementation) -> AttentionImplementation:
    return cast(AttentionImplementation, entry.function)


def _implementation(problem: AttentionProblem, platform: str | None, cfg: AttentionConfig) -> AttentionImplementation:
    """The best implementation that supports the call and runs `cfg`; ValueError with the reasons when there is none."""
    asked, configured = as_platform(platform), as_platform(cfg.platform)
    if asked is not None and configured is not None and asked is not configured:
        raise ValueError(f"platform {str(asked)!r} was asked for, but cfg is for platform {str(configured)!r}.")
    wanted, backend = asked or configured, None if cfg.backend == Backend.ANY else cfg.backend
    kernel_registry.select("attention", wanted, backend, problem)  # raises, with the reasons, when nothing fits the call
    refused = []
    for entry in kernel_registry.list_implementations("attention"):
        if wanted in (None, entry.platform):
            function = _function(entry)
            reason = kernel_registry.refusal(entry, problem, backend) or function.refuses(problem, cfg)
            if reason is None:
                return function
            refused.append(f"{entry.platform}: {reason}")
    raise ValueError(f"attention cannot run with {cfg}: {'; '.join(refused)}.")


def attention(
    query: Float[Array, "B T H D"],
    key: Float[Array, "B S Hkv D"],
    value: Float[Array, "B S Hkv V"],
    bias: Float[Array, " ..."] | None = None,
    dropout_rng: Array | None = None,
    softmax_aux: Float[Array, " ..."] | None = None,
    *,
    mask_info: MaskInfo | None = None,
    attention_mask: Bool[Array, " ..."] | None = None,
    init_bias: Callable[[], Array] | None = None,
    deterministic: bool = True,
    softmax_scale: float | Float[Array, ""] | None = None,
    logits_soft_cap: float | None = None,
    dtype: Any = jnp.bfloat16,
    softmax_dtype: Any = None,
    dropout_prob: float = 0.0,
    causal: bool = False,
    sliding_window: int | tuple[int, int] | None = None,
    return_weights: bool = True,
    platform: str | None = None,
    cfg: AttentionConfig | None = None,
) -> tuple[Float[Array, "B T H V"], Float[Array, "B H T S"]] | Float[Array, "B T H V"]:
    """Softmax attention: `softmax(softmax_scale * query key^T + bias) value`, per head.

    In order: scale, soft cap, bias, masks, softmax, dropout, times value. A query that may attend to nothing gives 0, with
    a gradient of 0. Heads are grouped: query head h reads key head `h // (H / Hkv)`.

    Args:
        query: `[B, T, H, D]`.
        key: `[B, S, Hkv, D]`, H a multiple of Hkv.
        value: `[B, S, Hkv, V]`.
        bias: added to the logits, `[1|B, 1|Hkv|H, 1|T, 1|S]`; lower ranks broadcast from the right. -inf masks.
        dropout_rng: the random key for dropout; the same key drops the same weights.
        softmax_aux: attention sinks, `[sinks]` or `[H|Hkv, sinks]`: logits that only count in the softmax's sum.
        mask_info: who may attend to whom; with segments or positions, `causal` and `sliding_window` compare positions.
        attention_mask: True = attend, `[B, S]`, `[B, T, S]` or `[B, 1|Hkv|H, T, S]`; applies beside bias and mask_info.
        init_bias: gives the bias; called only when neither a bias nor a mask is given.
        deterministic: False turns dropout on.
        softmax_scale: a number or a traced scalar; None means `D ** -0.5`.
        logits_soft_cap: bounds scores by `cap * tanh(scores / cap)`, before the bias.
        dtype: the compute and output dtype; None takes that of the inputs.
        softmax_dtype: the dtype of logits and exponentials; None means float32 (float64 for float64).
        dropout_prob: the probability that a weight is dropped; the others grow by `1 / (1 - dropout_prob)`.
        causal: keeps keys `j <= i`.
        sliding_window: `(left, right)` keeps keys `i - left <= j <= i + right`; an int w is `(w, w)`.
        return_weights: False returns the output alone.
        platform: "xla", "cuda", or "auto" (as None): the best that supports the call here.
        cfg: an explicit configuration, used as given.

    Returns:
        `(output, weights)`, `[B, T, H, V]` and `[B, H, T, S]`, or the output. Weights are what multiplies value, computed
        apart from the output: under `jit`, unused ones are dropped by the compiler and cost nothing.

    Example:
        >>> q = jax.random.normal(jax.random.key(0), (1, 6, 4, 8))
        >>> k = v = jax.random.normal(jax.random.key(1), (1, 6, 2, 8))
        >>> out, weights = attention(q, k, v, causal=True, dtype=None)
        >>> out.shape, weights.shape
        ((1, 6, 4, 8), (1, 4, 6, 6))
        >>> packed = MaskInfo.from_cu_seqlens(jnp.array([0, 2, 6]))
        >>> attention(q, k, v, mask_info=packed, causal=True, return_weights=False).dtype
        dtype(bfloat16)
    """
    problem = AttentionProblem.from_arguments(
        query,
        key,
        value,
        bias,
        dropout_rng,
        softmax_aux,
        mask_info=mask_info,
        attention_mask=attention_mask,
        init_bias=init_bias,
        deterministic=deterministic,
        softmax_scale=softmax_scale,
        logits_soft_cap=logits_soft_cap,
        dtype=dtype,
        softmax_dtype=softmax_dtype,
        dropout_prob=dropout_prob,
        causal=causal,
        sliding_window=sliding_window,
        return_weights=return_weights,
    )
    if cfg is not None and not isinstance(cfg, AttentionConfig):
        raise TypeError(f"cfg must be an AttentionConfig or None; got {type(cfg).__name__}.")
    output, weights = default_executor()(Attention(), problem, platform=platform, _cfg=cfg)
    return output if weights is None else (output, weights)
