"""Checks of single arguments of `attention`: each returns the argument in the form that AttentionProblem holds."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, UInt32

from ejkernel._meshes import repeat
from ejkernel._numbers import as_array, as_dtype, as_flag, as_float
from ejkernel.types.mask import MaskInfo

_DTYPES = ("float16", "bfloat16", "float32", "float64")
_LARGEST_CAP = 2.0**100  # larger ones change no score, and what kernels multiply and divide by leaves float32


class Shape(NamedTuple):
    """The sizes that other arguments must match."""

    batch: int
    q_len: int
    kv_len: int
    heads: int
    kv_heads: int
    head_dim: int

    @classmethod
    def of(cls, query: Float[Array, "B T H D"], key: Float[Array, "B S Hkv D"]) -> Shape:
        return cls(query.shape[0], query.shape[1], key.shape[1], query.shape[2], key.shape[2], query.shape[3])

    @property
    def plane(self) -> str:
        """The legal shape of a bias or mask, in words."""
        sizes = ((1, self.batch), (1, self.kv_heads, self.heads), (1, self.q_len), (1, self.kv_len))
        return f"[{', '.join(_either(*legal) for legal in sizes)}] (batch, heads, queries, keys)"


def _either(*sizes: int) -> str:
    """Each size once: "1|2|4"."""
    return "|".join(dict.fromkeys(map(str, sizes)))


@functools.cache
def accumulation_dtype(dtype: Any) -> Any:
    """Float32, or float64 when `dtype` is; without JAX's promotion, which may be set to refuse."""
    return np.dtype(np.float64) if dtype == np.float64 else np.dtype(np.float32)


def operands(query: Any, key: Any, value: Any, dtype: Any) -> tuple[Array, Array, Array]:
    """Query, key and value in the compute dtype, their shapes checked against each other."""
    arrays = {name: as_array(name, x) for name, x in (("query", query), ("key", key), ("value", value))}
    for name, x in arrays.items():
        if x.ndim != 4:
            raise ValueError(f"{name} must be rank 4 [batch, length, heads, channels]; got shape {list(x.shape)}.")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name} must be floating point; got {x.dtype}.")
    q, k, v = arrays.values()
    if k.shape[0] != q.shape[0] or k.shape[3] != q.shape[3]:
        raise ValueError(
            f"key must be [{q.shape[0]}, S, Hkv, {q.shape[3]}] to match query {list(q.shape)} in batch and channels; "
            f"got {list(k.shape)}."
        )
    if v.shape[:3] != k.shape[:3]:
        sizes = ", ".join(map(str, k.shape[:3]))
        raise ValueError(f"value must be [{sizes}, V] (batch, length, heads, channels) to match key; got {list(v.shape)}.")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"query heads must be a multiple of key heads; got {q.shape[2]} and {k.shape[2]}.")
    if q.shape[3] == 0:
        raise ValueError("query and key must have at least one channel; got 0.")
    if dtype is not None:
        compute = jax.dtypes.canonicalize_dtype(as_dtype("dtype", dtype))
    else:
        compute = q.dtype if q.dtype == k.dtype == v.dtype else _promoted(q, k, v)
    if compute.name not in _DTYPES:
        raise TypeError(f"dtype must be None or one of {', '.join(_DTYPES)}; got {compute.name}.")
    cast = [x if x.dtype == compute else x.astype(compute) for x in (q, k, v)]
    return cast[0], cast[1], cast[2]


def _promoted(q: Array, k: Array, v: Array) -> np.dtype:
    """The dtype that JAX's promotion gives query, key and value together, as it is set."""
    try:
        return jnp.result_type(q, k, v)
    except jax.dtypes.TypePromotionError:
        how = jax.config.jax_numpy_dtype_promotion  # type: ignore[attr-defined]  # made from flags
        raise TypeError(
            f"query, key and value must be of one dtype when dtype is None and jax.numpy_dtype_promotion({how!r}) does not "
            f"join theirs; got {q.dtype}, {k.dtype} and {v.dtype}. Cast them, or say dtype."
        ) from None


def scale(softmax_scale: Any, head_dim: int) -> tuple[float, Array | None]:
    """`(number, None)`, or `(1.0, scalar)` when it is traced; None means `head_dim ** -0.5`."""
    if softmax_scale is None:
        return head_dim**-0.5, None
    if isinstance(softmax_scale, jax.Array):
        is_real = any(jnp.issubdtype(softmax_scale.dtype, kind) for kind in (jnp.floating, jnp.integer))
        if softmax_scale.shape != () or not is_real:
            came = f"{softmax_scale.dtype.name}{list(softmax_scale.shape)}"
            raise ValueError(f"softmax_scale must be a number or a scalar array; got {came}.")
    if isinstance(softmax_scale, jax.core.Tracer):
        return 1.0, softmax_scale
    return as_float("softmax_scale", softmax_scale), None


def soft_cap(cap: Any) -> float | None:
    """The soft cap as a positive number, or None."""
    if cap is None:
        return None
    if isinstance(cap, jax.core.Tracer):
        raise TypeError("logits_soft_cap must be a number that is known while tracing; got a traced value.")
    number = as_float("logits_soft_cap", cap)
    if not 0 < number <= np.finfo(np.float32).max:
        raise ValueError(f"logits_soft_cap must be positive and a float32 (None: no cap); got {cap}.")
    return min(number, _LARGEST_CAP)


def softmax_dtype(dtype: Any, default: Any) -> Any:
    """The softmax's dtype; None means `default`."""
    chosen = jnp.dtype(default) if dtype is None else jax.dtypes.canonicalize_dtype(as_dtype("softmax_dtype", dtype))
    if chosen.name not in _DTYPES:
        raise TypeError(f"softmax_dtype must be None or one of {', '.join(_DTYPES)}; got {chosen.name}.")
    return chosen


def bias(value: Any, shape: Shape) -> Float[Array, "b h t s"]:
    """A bias of rank 4; lower ranks broadcast from the right, as NumPy does."""
    value = as_array("bias", value)
    if not jnp.issubdtype(value.dtype, jnp.floating):
        raise TypeError(f"bias must be floating point; got {value.dtype}. A boolean mask goes to attention_mask.")
    if value.ndim > 4:
        raise ValueError(f"bias must be {shape.plane}; got shape {list(value.shape)}.")
    return _plane("bias", value.reshape((1,) * (4 - value.ndim) + value.shape), shape)


def mask(argument: str, value: Any, shape: Shape) -> Bool[Array, "b h t s"]:
    """A mask of rank 4, from `[B, S]`, `[B, T, S]` or `[B, heads, T, S]`."""
    value = as_array(argument, value)
    if value.dtype != bool:
        raise TypeError(f"{argument} must be bool (True = attend); got {value.dtype}. An additive mask goes to bias.")
    given = value.shape
    if value.ndim == 2:
        value = value[:, None, None, :]
    elif value.ndim == 3:
        value = value[:, None, :, :]
    elif value.ndim != 4:
        raise ValueError(f"{argument} must be [B, S], [B, T, S] or [B, heads, T, S]; got shape {list(value.shape)}.")
    return _plane(argument, value, shape, given)


def _plane(argument: str, value: Array, shape: Shape, given: tuple[int, ...] | None = None) -> Array:
    """`value`, if it has the sizes of a plane of scores; `given`: its shape as the caller has it."""
    legal = (
        {1, shape.batch},
        {1, shape.kv_heads, shape.heads},
        {1, shape.q_len},
        {1, shape.kv_len},
    )
    if any(size not in sizes for size, sizes in zip(value.shape, legal, strict=True)):
        got = value.shape if given is None else given
        of_rank = {
            2: f" Rank 2 is [batch, keys], here [{shape.batch}, {shape.kv_len}].",
            3: f" Rank 3 is [batch, queries, keys], here [{shape.batch}, {shape.q_len}, {shape.kv_len}].",
        }
        hint = "" if given is None else of_rank.get(len(got), "")
        raise ValueError(f"{argument} must be {shape.plane} to match query and key; got {list(got)}.{hint}")
    return value


def both(a: Bool[Array, "b h t s"], b: Bool[Array, "b h t s"], shape: Shape) -> Bool[Array, "b h t s"]:
    """The pairs that both masks keep; a mask per key head meets one per query head as one per query head."""
    if a.shape[1] != b.shape[1] and 1 not in (a.shape[1], b.shape[1]):
        a, b = (repeat(m, shape.heads // m.shape[1], axis=1) for m in (a, b))
    return a & b


def mask_info(info: MaskInfo, shape: Shape) -> None:
    """ValueError unless the MaskInfo, with all that it holds, is for this call's batch and lengths."""
    batch, _, q_len, kv_len = info.shape
    if batch not in (1, shape.batch) or (q_len, kv_len) != (shape.q_len, shape.kv_len):
        raise ValueError(
            f"mask_info must be for batch {_either(1, shape.batch)}, {shape.q_len} queries and {shape.kv_len} keys; "
            f"it is for batch {batch}, {q_len} queries and {kv_len} keys."
        )
    of_queries, of_keys = ("q_segment_ids", "q_positions"), ("kv_segment_ids", "kv_positions")
    for name, length in (*((name, q_len) for name in of_queries), *((name, kv_len) for name in of_keys)):
        ids = getattr(info, name)
        if ids is not None and ids.shape not in ((1, length), (batch, length)):
            raise ValueError(f"mask_info.{name} must be [{_either(1, batch)}, {length}]; got {list(ids.shape)}.")


def sinks(softmax_aux: Any, shape: Shape, dtype: Any) -> Float[Array, " H"] | None:
    """The sinks of each head as one logit, the log of the sum of their exponentials."""
    softmax_aux = as_array("softmax_aux", softmax_aux)
    if not jnp.issubdtype(softmax_aux.dtype, jnp.floating):
        raise TypeError(f"softmax_aux must be floating point; got {softmax_aux.dtype}.")
    rows = softmax_aux[None] if softmax_aux.ndim == 1 else softmax_aux
    legal = {shape.heads, shape.kv_heads} | ({1} if softmax_aux.ndim == 1 else set())
    if rows.ndim != 2 or rows.shape[0] not in legal:
        heads = _either(shape.kv_heads, shape.heads)
        raise ValueError(f"softmax_aux must be [sinks] or [{heads}, sinks] (heads first); got shape {list(softmax_aux.shape)}.")
    if rows.shape[1] == 0:
        return None
    rows = rows.astype(dtype)
    top = jax.lax.stop_gradient(rows.max(1, keepdims=True))
    top = jnp.where(jnp.isfinite(top), top, 0)
    total = jnp.exp(rows - top).sum(1)
    # A head whose sinks are all -inf has none; log(0) would make the gradient NaN.
    joined = jnp.where(total > 0, jnp.log(jnp.where(total > 0, total, 1)) + top[:, 0], -jnp.inf)
    return repeat(joined, shape.heads // rows.shape[0], axis=0)


def dropout_words(shape: Shape, deterministic: bool, prob: float, rng: Any) -> UInt32[Array, "B H T 2"] | None:
    """Two random words for every row of weights, or None when nothing is dropped."""
    if isinstance(prob, jax.core.Tracer) or not 0.0 <= as_float("dropout_prob", prob) < 1.0:
        raise ValueError(f"dropout_prob must be a known number of at least 0 and below 1; got {prob}.")
    if as_flag("deterministic", deterministic) or float(prob) == 0.0:
        return None
    if rng is None:
        raise ValueError("dropout_rng must be given when deterministic=False and dropout_prob > 0; got None.")
    try:
        return jax.random.bits(rng, (shape.batch, shape.heads, shape.q_len, 2), jnp.uint32)
    except (TypeError, ValueError) as problem:
        why = str(problem).splitlines()[0]
        raise TypeError(f"dropout_rng must be one key, as jax.random.key gives it; got {rng!r} ({why})") from None
