"""Softmax attention: one call for every device, with every mask, bias and window."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from ejkernel._checking import ValueCheck, checking
from ejkernel._device import device_of
from ejkernel.kernels._attention import AttentionConfig
from ejkernel.kernels._attention.operation import ATTENTION
from ejkernel.kernels._attention.packing import everything, packed
from ejkernel.modules._registry_kernel import RegistryKernel
from ejkernel.modules.base import default_executor
from ejkernel.modules.operations._results import OutputAndWeights
from ejkernel.modules.operations._value_checks import warn_of_layout, warn_of_sinks
from ejkernel.ops import Invocation
from ejkernel.types.mask import MaskInfo

__all__ = ["Attention", "AttentionConfig", "attention"]

_LENGTH_AXES = {
    "query": (1,),
    "key": (1,),
    "value": (1,),
    "bias": (2, 3),
    "mask": (2, 3),
    "q_segment_ids": (1,),
    "kv_segment_ids": (1,),
    "q_positions": (1,),
    "kv_positions": (1,),
    "dropout_words": (2,),
}


class Attention(RegistryKernel[AttentionConfig, Any]):
    """Softmax attention as the executor sees it: solves an `AttentionProblem`."""

    signature = ATTENTION
    numbers = ("logits_soft_cap", "dropout_prob", "sliding_window")

    def problem(self, *args: Any, **kwargs: Any) -> Any:
        """Without what no choice depends on: the values of scale, cap and dropout, and whether weights are wanted too."""
        problem = super().problem(*args, **kwargs)
        soft_cap, dropout = None if problem.soft_cap is None else 1.0, 0.5 if problem.dropout_prob else 0.0
        return dataclasses.replace(problem, scale=1.0, soft_cap=soft_cap, dropout_prob=dropout, return_weights=False)

    def value_checks(self, named: Mapping[str, Any]) -> Iterable[ValueCheck]:
        if checking():
            warn_of_sinks(self.op_id, named["softmax_aux"], named["query"])
        if checking() and len(np.shape(named["query"])) == 4:
            warn_of_layout(self.called, named["query"])
        return ()

    def results(self, found: tuple[jax.Array, jax.Array], named: Mapping[str, Any]) -> Any:
        return found if named["return_weights"] else found[0]

    def prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What depends on values: the bias that `init_bias` gives, and the packing of segments, which cuDNN reads."""
        args, kwargs = super().prepare(args, kwargs)
        info, init_bias = kwargs.get("mask_info"), kwargs.get("init_bias")
        if callable(init_bias):
            given = (args[3] if len(args) > 3 else kwargs.get("bias"), info, kwargs.get("attention_mask"))
            drawn = init_bias() if all(x is None for x in given) else None
            kwargs = {name: x for name, x in kwargs.items() if name != "init_bias"}
            if drawn is not None and len(args) > 3:
                args = (*args[:3], drawn, *args[4:])
            elif drawn is not None:
                kwargs["bias"] = drawn
        query = args[0] if args else kwargs.get("query")
        if not isinstance(info, MaskInfo) or not isinstance(query, (jax.Array, np.ndarray)) or query.ndim != 4:
            return args, kwargs
        if device_of((query,)).backend == "gpu":
            kwargs = {**kwargs, "mask_info": packed(info, query.shape[0])}
        return args, kwargs

    def default_policy(self, backend: str) -> str:
        """Heuristics everywhere: a fused kernel has nothing to choose, and the others' tiles were measured."""
        return "heuristics"

    def length_axes(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Lengths of queries and keys; an axis of size 1 does not vary and is no length."""
        return tuple(axis for axis in _LENGTH_AXES.get(name, ()) if shape[axis] != 1)

    def random_inputs(self, inv: Invocation[Any, Any], key: jax.Array) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """As by default, but with masks that keep everything and full segments: otherwise there is nothing to measure."""
        from ejkernel.ops.inputs import random_arguments  # only tuning needs it

        args, kwargs = random_arguments(inv, key)
        if kwargs.get("attention_mask") is not None:
            kwargs["attention_mask"] = jnp.ones_like(kwargs["attention_mask"])
        if kwargs.get("mask_info") is not None:
            kwargs["mask_info"] = everything(kwargs["mask_info"])
        return args, kwargs


@Attention.called_by_users
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
) -> OutputAndWeights | Float[Array, "B T H V"]:
    """Softmax attention: `softmax(softmax_scale * query key^T + bias) value`, per head.

    The order is: scale, soft cap, bias, masks, softmax, dropout, product with value. A query that may attend to no key gives
    0, with a gradient of 0. Heads are grouped: query head h reads key head `h // (H / Hkv)`.

    Args:
        query: `[B, T, H, D]`.
        key: `[B, S, Hkv, D]`, H a multiple of Hkv.
        value: `[B, S, Hkv, V]`.
        bias: added to the logits, `[1|B, 1|Hkv|H, 1|T, 1|S]`; lower ranks broadcast from the right. -inf masks.
        dropout_rng: the random key for dropout; the same key drops the same weights.
        softmax_aux: attention sinks, `[sinks]` or `[H|Hkv, sinks]`: logits that count in the softmax's sum alone.
        mask_info: who may attend to whom; with segments or positions, `causal` and `sliding_window` compare positions.
        attention_mask: True attends, `[B, S]`, `[B, T, S]` or `[B, 1|Hkv|H, T, S]`; applies together with bias and mask_info.
        init_bias: gives the bias; called only when neither a bias nor a mask is given.
        deterministic: False turns dropout on.
        softmax_scale: a number or a scalar array; None means `D ** -0.5`. Each new number compiles again; an array does
            not, but cuDNN takes numbers only.
        logits_soft_cap: bounds scores by `cap * tanh(scores / cap)`, before the bias.
        dtype: the compute and output dtype; None takes that of the inputs.
        softmax_dtype: the dtype of logits and exponentials; None means float32 (float64 for float64).
        dropout_prob: the probability that a weight is dropped; the others grow by `1 / (1 - dropout_prob)`.
        causal: keeps keys `j <= i`.
        sliding_window: `(left, right)` keeps keys `i - left <= j <= i + right`; an int w is `(w, w)`.
        return_weights: False returns the output alone.
        platform: "xla", "cuda", "triton" or "pallas"; "auto" or None takes the best that supports the call here.
        cfg: an explicit configuration, used as given.

    Returns:
        `(output, weights)`, `[B, T, H, V]` and `[B, H, T, S]`, or the output. Weights are what multiplies value. They are
        computed apart from the output: under `jit` the compiler drops unused ones, and they cost nothing.

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
    return default_executor()(
        Attention(), query, key, value, bias, dropout_rng, softmax_aux, mask_info=mask_info, attention_mask=attention_mask,
        init_bias=init_bias, deterministic=deterministic, softmax_scale=softmax_scale, logits_soft_cap=logits_soft_cap,
        dtype=dtype, softmax_dtype=softmax_dtype, dropout_prob=dropout_prob, causal=causal, sliding_window=sliding_window,
        return_weights=return_weights, platform=platform, _cfg=cfg,
    )  # fmt: skip
