"""One call of softmax attention, checked, completed and merged: what every platform takes.

scores[b, h, i, j]  = scale * query[b, i, h] . key[b, j, h // (H / Hkv)]
logits              = soft_cap * tanh(scores / soft_cap) + bias,  -inf where masked
weights             = exp(logits) / (sum over keys of exp(logits) + sum over sinks of exp(sink)),  then dropout
output[b, i, h]     = sum over j of weights[b, h, i, j] * value[b, j, h // (H / Hkv)]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from ejkernel._device import Device, device_of
from ejkernel._numbers import as_flag
from ejkernel._sizes import known
from ejkernel.kernels._attention import arguments as check
from ejkernel.kernels._attention.packing import Packed, Packing
from ejkernel.types.mask import MaskInfo, as_window


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionProblem:
    """A JAX pytree: arrays are leaves, everything else is static. Planes have any axis of size 1 where they do not vary.

    Attributes:
        query: `[B, T, H, D]` in the compute dtype, as are key `[B, S, Hkv, D]` and value `[B, S, Hkv, V]`.
        bias: `[1|B, 1|Hkv|H, 1|T, 1|S]`, added after the soft cap; any float dtype, -inf masks.
        mask: bool of the same kind of shape, True = attend.
        q_segment_ids: `[1|B, T]`, with kv_segment_ids `[1|B, S]`: only equal, non-negative ids attend.
        q_positions: `[1|B, T]`, with kv_positions `[1|B, S]`: what `left` and `right` compare; None: indices.
        packing: the segments as rows of their own, where ids were known and nothing but segments decides who attends.
        sinks: `[H]`, log of the sum of exp of each head's sinks, in the softmax's accumulation dtype.
        dropout_words: `[B, H, T, 2]`, random words from which row (b, h, i) draws its dropout; None: no dropout.
        traced_scale: the scale when it is traced; `scale` is then 1.
        scale: the scale as a number.
        left: keeps keys at positions >= that of the query - left; None: all.
        right: keeps keys at positions <= that of the query + right; None: all (causal is `right=0`).
        soft_cap: None, or the bound of the logits before the bias.
        dropout_prob: the probability that a weight is dropped; 0 without `dropout_words`.
        softmax_dtype: logits and exponentials are in this dtype; sums are in float32 or wider.
        return_weights: whether the weights `[B, H, T, S]` are wanted beside the output.
        device: where the call computes.
    """

    query: Float[Array, "B T H D"]
    key: Float[Array, "B S Hkv D"]
    value: Float[Array, "B S Hkv V"]
    bias: Float[Array, "b h t s"] | None = None
    mask: Bool[Array, "b h t s"] | None = None
    q_segment_ids: Int[Array, "b T"] | None = None
    kv_segment_ids: Int[Array, "b S"] | None = None
    q_positions: Int[Array, "b T"] | None = None
    kv_positions: Int[Array, "b S"] | None = None
    packing: Packing | None = None
    sinks: Float[Array, " H"] | None = None
    dropout_words: UInt32[Array, "B H T 2"] | None = None
    traced_scale: Float[Array, ""] | None = None
    scale: float = 1.0
    left: int | None = None
    right: int | None = None
    soft_cap: float | None = None
    dropout_prob: float = 0.0
    softmax_dtype: Any = np.dtype("float32")  # noqa: RUF009 (immutable)
    return_weights: bool = True
    device: Device = dataclasses.field(default_factory=lambda: device_of(()))

    @property
    def batch(self) -> int:
        """B."""
        return self.query.shape[0]

    @property
    def q_len(self) -> int:
        """T."""
        return self.query.shape[1]

    @property
    def kv_len(self) -> int:
        """S."""
        return self.key.shape[1]

    @property
    def heads(self) -> int:
        """H."""
        return self.query.shape[2]

    @property
    def kv_heads(self) -> int:
        """Hkv."""
        return self.key.shape[2]

    @property
    def groups(self) -> int:
        """G = H / Hkv: how many query heads share a key head."""
        return self.heads // self.kv_heads

    @property
    def head_dim(self) -> int:
        """D."""
        return self.query.shape[3]

    @property
    def value_dim(self) -> int:
        """V."""
        return self.value.shape[3]

    @property
    def dtype(self) -> Any:
        """The compute dtype, which is also the output's."""
        return self.query.dtype

    @property
    def accumulation_dtype(self) -> Any:
        """Float32, or wider when the compute dtype is: that of scores, sums and unscaled outputs."""
        return check.accumulation_dtype(self.dtype)

    @classmethod
    def from_arguments(
        cls,
        query: Float[Array, "B T H D"],
        key: Float[Array, "B S Hkv D"],
        value: Float[Array, "B S Hkv V"],
        bias: Float[Array, " ..."] | None = None,
        dropout_rng: Array | None = None,
        softmax_aux: Float[Array, " ..."] | None = None,
        *,
        mask_info: MaskInfo | Packed | None = None,
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
    ) -> AttentionProblem:
        """Checks the arguments of `attention` and completes them; ValueError or TypeError names what is wrong."""
        query, key, value = check.operands(query, key, value, dtype)
        shape = check.Shape.of(query, key)
        if bias is None and init_bias is not None and attention_mask is None and mask_info is None:
            if not callable(init_bias):
                raise TypeError(f"init_bias must be a function that gives the bias; got {init_bias!r}.")
            bias = init_bias()
        scale, traced_scale = check.scale(softmax_scale, shape.head_dim)
        left, right = (None, None) if sliding_window is None else as_window("sliding_window", sliding_window)
        right = 0 if as_flag("causal", causal) else right
        accumulation = check.accumulation_dtype(query.dtype)
        words = check.dropout_words(shape, deterministic, dropout_prob, dropout_rng)
        problem = cls(
            query=query,
            key=key,
            value=value,
            bias=None if bias is None else check.bias(bias, shape),
            mask=None if attention_mask is None else check.mask("attention_mask", attention_mask, shape),
            sinks=None if softmax_aux is None else check.sinks(softmax_aux, shape, accumulation),
            dropout_words=words,
            traced_scale=traced_scale,
            scale=scale,
            left=left,
            right=right,
            soft_cap=check.soft_cap(logits_soft_cap),
            dropout_prob=0.0 if words is None else float(dropout_prob),
            softmax_dtype=check.softmax_dtype(softmax_dtype, accumulation),
            return_weights=as_flag("return_weights", return_weights),
            device=device_of((query, key, value)),
        )
        return problem._masked_by(mask_info, shape)._without_idle_bounds()

    def _masked_by(self, info: MaskInfo | Packed | None, shape: check.Shape) -> AttentionProblem:
        """With the mask or segments of a MaskInfo, and its positions where something compares them."""
        if info is None:
            return self
        packing = None
        if isinstance(info, Packed):
            info, packing = info
        if not isinstance(info, MaskInfo):
            raise TypeError(f"mask_info must be a MaskInfo; got {type(info).__name__}. A plain array goes to attention_mask.")
        info = info.checked()
        check.mask_info(info, shape)
        if packing is None and self.device.backend == "gpu":  # nothing else reads it
            packing = Packing.of(info, self.batch)
        fields: dict[str, Any] = {}
        if info.attention_mask is not None:
            mask = check.mask("mask_info", info.attention_mask, shape)
            fields["mask"] = mask if self.mask is None else check.both(self.mask, mask, shape)
        else:
            fields["q_segment_ids"], fields["kv_segment_ids"] = info.q_segment_ids, info.kv_segment_ids
            fields["packing"] = packing
        by_position = info.q_segment_ids is not None or info.q_positions is not None or info.kv_positions is not None
        if by_position and (self.left is not None or self.right is not None):
            fields["q_positions"], fields["kv_positions"] = info.compared_positions()
        return dataclasses.replace(self, **fields)

    def _without_idle_bounds(self) -> AttentionProblem:
        """Without bounds that no pair of indices reaches, so that what is not masked is known not to be."""
        if self.q_positions is not None:
            return self
        idle = lambda bound, length: bound is not None and known(length) and bound >= length - 1
        left = None if idle(self.left, self.q_len) else self.left
        right = None if idle(self.right, self.kv_len) else self.right
        return self if (left, right) == (self.left, self.right) else dataclasses.replace(self, left=left, right=right)

    def grouped(self, plane: Array) -> Array:
        """A plane `[b, 1|Hkv|H, ...]` as `[b, 1|Hkv, 1|G, ...]`: query heads beside their key head."""
        split = {1: (1, 1), self.kv_heads: (self.kv_heads, 1), self.heads: (self.kv_heads, self.groups)}[plane.shape[1]]
        return plane.reshape(plane.shape[0], *split, *plane.shape[2:])

    @staticmethod
    def roles() -> dict[str, tuple[str, ...]]:
        """What the axes of each array are."""
        plane = ("batch", "heads", "queries", "keys")
        return {
            "query": ("batch", "queries", "heads", "channels"),
            "key": ("batch", "keys", "heads", "channels"),
            "value": ("batch", "keys", "heads", "value channels"),
            "bias": plane,
            "mask": plane,
            **dict.fromkeys(("q_segment_ids", "q_positions"), ("batch", "queries")),
            **dict.fromkeys(("kv_segment_ids", "kv_positions"), ("batch", "keys")),
            "sinks": ("heads",),
            "dropout_words": ("batch", "heads", "queries", "words"),
            "traced_scale": (),
        }

    @property
    def static_fields(self) -> dict[str, Any]:
        """The fields that are not arrays, by name."""
        return {name: getattr(self, name) for name in _STATIC}

    @property
    def score_count(self) -> int:
        """B * H * T * S."""
        return self.batch * self.heads * self.q_len * self.kv_len


_STATIC = ("scale", "left", "right", "soft_cap", "dropout_prob", "softmax_dtype", "return_weights", "device")
jax.tree_util.register_dataclass(
    AttentionProblem,
    data_fields=[field.name for field in dataclasses.fields(AttentionProblem) if field.name not in _STATIC],
    meta_fields=list(_STATIC),
)
