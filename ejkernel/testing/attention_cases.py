"""Calls of `attention` that every implementation must get right, and how to compare them with the reference."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._attention import AttentionProblem
from ejkernel.kernels._attention.dropout import kept
from ejkernel.testing.attention_reference import Reference, attention_reference
from ejkernel.testing.compare import ATTENTION_TOLERANCES, assert_close
from ejkernel.types.mask import MaskInfo


@dataclasses.dataclass(frozen=True)
class AttentionCase:
    """One call, made from a seed: shapes, and the options that `arguments` turns into arrays.

    Attributes:
        mask: "keys" `[B, S]`, "pairs" `[B, T, S]`, or the number of heads of `[B, heads, T, S]`; every third query of a
            mask over pairs attends to nothing.
        bias: the shape's `(batch, heads, queries, keys)`, each 1 or full ("B", "Hkv", "H", "T", "S").
        sinks: the shape of softmax_aux, with "H" and "Hkv" for head counts.
        segments: "packed" (three segments and padding, in the same row) or "decode" (queries at the end of a cache).
        size: the size of query entries. Large ones make logits of 1e4 and more; entries are then rounded, so that float32
            has the scores exactly and results can be compared.
    """

    name: str
    batch: int = 2
    q_len: int = 37
    kv_len: int = 37
    heads: int = 4
    kv_heads: int = 2
    channels: int = 16
    value_channels: int = 16
    dtype: str = "float32"
    mask: str | int | None = None
    bias: tuple[int | str, ...] | None = None
    sinks: tuple[int | str, ...] | None = None
    segments: str | None = None
    causal: bool = False
    window: int | tuple[int, int] | None = None
    scale: float | None = None
    soft_cap: float | None = None
    dropout: float = 0.0
    size: float = 1.0
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    def _shape(self, dims: tuple[int | str, ...]) -> tuple[int, ...]:
        sizes = {"B": self.batch, "H": self.heads, "Hkv": self.kv_heads, "T": self.q_len, "S": self.kv_len}
        return tuple(sizes[d] if isinstance(d, str) else d for d in dims)

    @functools.cached_property
    def arrays(self) -> dict[str, jax.Array]:
        """What gradients are taken of: query, key, value, and bias and softmax_aux where there are any."""
        rng = np.random.default_rng(self.seed)
        shapes: dict[str, tuple[int, ...]] = {
            "query": (self.batch, self.q_len, self.heads, self.channels),
            "key": (self.batch, self.kv_len, self.kv_heads, self.channels),
            "value": (self.batch, self.kv_len, self.kv_heads, self.value_channels),
        }
        if self.bias is not None:
            shapes["bias"] = self._shape(self.bias)
        if self.sinks is not None:
            shapes["softmax_aux"] = self._shape(self.sinks)
        arrays = {name: rng.normal(size=shape) for name, shape in shapes.items()}
        arrays["query"] = arrays["query"] * self.size
        if self.size >= 1e3:
            arrays["query"], arrays["key"] = np.round(arrays["query"]), np.round(arrays["key"] * 4) / 4
        return {name: jnp.asarray(x, self.dtype) for name, x in arrays.items()}

    @functools.cached_property
    def d_output(self) -> jax.Array:
        """The gradient of the output, `[B, T, H, V]`."""
        shape = (self.batch, self.q_len, self.heads, self.value_channels)
        return jnp.asarray(np.random.default_rng(self.seed + 1).normal(size=shape), self.dtype)

    @functools.cached_property
    def attention_mask(self) -> jax.Array | None:
        """The mask, where the case has one."""
        if self.mask is None:
            return None
        shape = {"keys": (self.batch, self.kv_len), "pairs": (self.batch, self.q_len, self.kv_len)}.get(
            str(self.mask), (self.batch, self.mask, self.q_len, self.kv_len)
        )
        mask = np.random.default_rng(self.seed + 2).random(shape) < 0.6  # type: ignore[arg-type]
        if self.mask != "keys":
            mask[..., ::3, :] = False
        return jnp.asarray(mask)

    @functools.cached_property
    def mask_info(self) -> MaskInfo | None:
        """The segments, where the case has any."""
        if self.segments is None:
            return None
        if self.segments == "packed":
            ends = np.array([0, self.q_len // 4, self.q_len // 2, self.q_len - 3])
            ids = np.searchsorted(ends[1:], np.arange(self.q_len), side="right")
            ids = np.where(ids < 3, ids, -1)
            return MaskInfo.from_segments(jnp.asarray(np.stack([ids] * self.batch), jnp.int32))
        filled = np.arange(self.kv_len) < self.kv_len - 2
        positions = np.arange(self.q_len) + self.kv_len - 2 - self.q_len
        return MaskInfo.from_segments(
            jnp.zeros((self.batch, self.q_len), jnp.int32),
            jnp.asarray(np.stack([np.where(filled, 0, -1)] * self.batch), jnp.int32),
            q_positions=jnp.asarray(np.stack([positions] * self.batch), jnp.int32),
        )

    @property
    def options(self) -> dict[str, Any]:
        """The other arguments of the call, by name."""
        chosen: dict[str, Any] = {
            "attention_mask": self.attention_mask,
            "mask_info": self.mask_info,
            "causal": self.causal,
            "sliding_window": self.window,
            "softmax_scale": self.scale,
            "logits_soft_cap": self.soft_cap,
            "dtype": None,
        }
        if self.dropout:
            chosen |= {"deterministic": False, "dropout_prob": self.dropout, "dropout_rng": jax.random.key(self.seed)}
        return chosen

    @functools.cached_property
    def problem(self) -> AttentionProblem:
        """The call as an implementation sees it."""
        arguments: dict[str, Any] = {**self.arrays, **self.options}
        return AttentionProblem.from_arguments(**arguments)

    @functools.cached_property
    def reference(self) -> Reference:
        """What the call must give."""
        mask, q_positions, kv_positions = self.attention_mask, None, None
        if self.mask_info is not None:
            segments = self.mask_info.get_or_compute_attention_mask()
            mask = segments if mask is None else segments & _rank4(mask)
            q_positions, kv_positions = self.mask_info.get_or_compute_positions()
        return attention_reference(
            **{name: x.astype(np.float64) for name, x in _numpy(self.arrays).items()},
            d_output=_numpy({"output": self.d_output})["output"],
            attention_mask=None if mask is None else np.asarray(mask),
            softmax_scale=self.scale,
            logits_soft_cap=self.soft_cap,
            causal=self.causal,
            sliding_window=self.window,
            q_positions=q_positions,
            kv_positions=kv_positions,
            dropout_factors=_dropout_factors(self.problem),
        )

    def value_and_gradients(self, function: Callable[..., Any], weights: bool = True) -> dict[str, np.ndarray]:
        """Output, weights and gradients of `function(query, key, value, **named) -> (output, weights)`."""
        options = self.options  # made here, not while tracing

        @jax.jit
        def both(arrays: dict[str, jax.Array], d_output: jax.Array) -> dict[str, jax.Array]:
            output, pull, attended = jax.vjp(lambda arrays: function(**arrays, **options), arrays, has_aux=True)
            return {"output": output, **pull(d_output)[0]} | ({"weights": attended} if weights else {})

        return _numpy(both(self.arrays, self.d_output))

    def evaluate(self, function: Callable[..., Any]) -> dict[str, np.ndarray]:
        """Output, weights and gradients of an implementation that returns `(output, weights)`."""
        return self.value_and_gradients(function)

    def values(self, function: Callable[..., Any]) -> dict[str, np.ndarray]:
        """Output and weights alone, which compile much faster."""
        options = self.options
        output, weights = jax.jit(lambda arrays: function(**arrays, **options))(self.arrays)
        return _numpy({"output": output, "weights": weights})

    @property
    def tolerance(self) -> tuple[float, float]:
        """The largest errors allowed, of values and of gradients."""
        return ATTENTION_TOLERANCES[self.dtype]

    def expected(self) -> dict[str, np.ndarray]:
        """What `evaluate` must give."""
        return {"output": self.reference.output, "weights": self.reference.weights, **self.reference.gradients}

    def check(self, function: Callable[..., Any], weights: bool = True) -> None:
        """AssertionError unless `function` gives what the reference says, gradients included; `weights`: these too."""
        got, want = self.value_and_gradients(function, weights), self.expected()
        assert_close(got, {name: want[name] for name in got}, self.tolerance)


def _numpy(arrays: dict[str, jax.Array]) -> dict[str, np.ndarray]:
    wide = {name: x if x.dtype == jnp.float64 else x.astype(jnp.float32) for name, x in arrays.items()}
    return {name: np.asarray(x) for name, x in wide.items()}


def _rank4(mask: jax.Array) -> jax.Array:
    return mask[:, None, None, :] if mask.ndim == 2 else mask[:, None] if mask.ndim == 3 else mask


def _dropout_factors(problem: AttentionProblem) -> np.ndarray | None:
    if problem.dropout_words is None:
        return None
    keep = kept(problem.dropout_words, jnp.arange(problem.kv_len), problem.dropout_prob)
    return np.asarray(keep) / (1 - problem.dropout_prob)


Case = AttentionCase
Wide = functools.partial(Case, dtype="bfloat16", batch=1, heads=2, kv_heads=1)
CASES = [
    Case("plain"),
    Case("causal", causal=True),
    Case("causal-more-queries", q_len=45, kv_len=29, causal=True),
    Case("causal-more-keys", q_len=29, kv_len=45, causal=True),
    Case("multi-head", kv_heads=4, causal=True),
    Case("multi-query", kv_heads=1),
    Case("one-query", q_len=1, causal=False),
    Case("one-key", kv_len=1),
    Case("other-value-channels", value_channels=5, channels=7, causal=True),
    Case("window", window=5),
    Case("window-left", window=(9, 0)),
    Case("window-right", window=(0, 4)),
    Case("window-none", window=0),
    Case("window-causal", window=(6, 3), causal=True),
    Case("window-past-the-keys", q_len=50, kv_len=20, window=(4, 4)),
    Case("mask-keys", mask="keys"),
    Case("mask-pairs", mask="pairs"),
    Case("mask-1-head", mask=1, causal=True),
    Case("mask-kv-heads", mask=2),
    Case("mask-heads", mask=4, window=8),
    Case("bias-1-head", bias=("B", 1, "T", "S"), causal=True),
    Case("bias-kv-heads", bias=("B", "Hkv", "T", "S")),
    Case("bias-heads", bias=(1, "H", "T", "S"), mask="pairs"),
    Case("bias-shared", bias=(1, 1, "T", "S"), window=7),
    Case("bias-keys", bias=("B", 1, 1, "S")),
    Case("bias-queries", bias=(1, "H", "T", 1), sinks=(1,)),  # without sinks it would shift all logits alike
    Case("bias-rank-2", bias=("T", "S")),
    Case("sinks", sinks=(3,), causal=True),
    Case("sinks-heads", sinks=("H", 2), mask="pairs"),
    Case("sinks-kv-heads", sinks=("Hkv", 1)),
    Case("soft-cap", soft_cap=2.0, bias=("B", "H", "T", "S"), causal=True, size=4.0),
    Case("scale", scale=0.3, soft_cap=5.0),
    Case("dropout", dropout=0.3, causal=True),
    Case("dropout-everything", dropout=0.2, mask="pairs", bias=(1, "H", "T", "S"), sinks=("H", 2), soft_cap=3.0),
    Case("packed", segments="packed"),
    Case("packed-causal", segments="packed", causal=True),
    Case("packed-window-mask", segments="packed", window=(4, 2), mask="keys"),
    Case("decode", segments="decode", q_len=5, kv_len=40, causal=True),
    Case("extreme", size=1e4, causal=True),
    Case("bfloat16", dtype="bfloat16", causal=True, q_len=64, kv_len=64),
    Case("bfloat16-sinks", dtype="bfloat16", sinks=("H", 1), window=9, bias=(1, 1, "T", "S")),
    Wide("bfloat16-64-channels", channels=64, value_channels=64, q_len=90, kv_len=90, causal=True, soft_cap=20.0),
    Wide("bfloat16-128-channels", channels=128, value_channels=128, q_len=90, kv_len=90, window=(40, 0), sinks=("H", 1)),
    Wide("bfloat16-128-channels-one-query", channels=128, value_channels=128, q_len=1, kv_len=600),
    Case("float16", dtype="float16", causal=True),
]
