"""The same calls by jax-linear-attention, where it is installed: Pallas kernels for Hopper, measured beside Triton's.

Nothing here runs without jax-linear-attention and a GPU of compute capability 9.0; importing this module needs neither.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel._device import default_device, describe

LIBRARY = "jax-linear-attention"
HOPPER = 90  # the one compute capability that its kernels are written for
_LINEAR = {frozenset(): "simple_gla", frozenset({"g"}): "simple_gla", frozenset({"g_gamma"}): "simple_gla"}
_LINEAR[frozenset({"gk"})] = "gla"


def missing() -> str | None:
    """Why jax-linear-attention cannot run here; None when it can."""
    if importlib.util.find_spec("jla") is None:
        return "jla not installed (pip install --no-deps jax-linear-attention: its operations need JAX alone)"
    if describe(default_device()).capability != HOPPER:
        return f"it needs an NVIDIA GPU of compute capability {HOPPER / 10}"
    return None


def linear(cu_seqlens: np.ndarray | None = None) -> Callable[..., jax.Array]:
    """Its function for arrays by the names of `recurrent_attention`, which gives the output `[B, T, H, V]`.

    One gate per head is its `simple_gla`, which needs a gate: without one, and with `g_gamma`, it gets what they amount to in
    `[B, T, H]`. A gate per key channel (`gk`, or `g` of rank 4) is its `gla`.

    Raises:
        ValueError: when called with gates or heads that it has no kernel for.
    """
    return functools.partial(_linear, _segments(cu_seqlens))


def delta(cu_seqlens: np.ndarray | None = None) -> Callable[..., jax.Array]:
    """Its function for arrays by the names of `gated_delta_rule`: `deltanet`, `gated_deltanet` or `kda` by the gate."""
    return functools.partial(_delta, _segments(cu_seqlens))


def _linear(segments: Mapping[str, jax.Array], /, **arrays: jax.Array) -> jax.Array:
    named = dict(arrays)
    q, k, v = (named.pop(name) for name in ("query", "key", "value"))
    if "g" in named and named["g"].ndim == 4:
        named["gk"] = named.pop("g")
    kind = _LINEAR.get(frozenset(named))
    if kind is None:
        raise ValueError(f"jax-linear-attention has no kernel for these gates together: {', '.join(sorted(named))}.")
    if k.shape[2] != q.shape[2]:
        raise ValueError("jax-linear-attention's linear kernels take as many key heads as query heads.")
    B, T, H, _ = q.shape
    # A gate that is not there: zeros. One that is the same for all tokens: that, for each of them.
    gate = next(iter(named.values()), jnp.zeros((), jnp.float32))
    return _run(kind, q, k, v, g=jnp.broadcast_to(gate, (B, T, H)) if gate.ndim < 3 else gate, **segments)


def _delta(
    segments: Mapping[str, jax.Array], /, query: jax.Array, key: jax.Array, value: jax.Array, beta: jax.Array, **gate: jax.Array
) -> jax.Array:
    kind = "deltanet" if not gate else "kda" if gate["g"].ndim == 4 else "gated_deltanet"
    # Its backward pass gives gradients of gates in float32 whatever their dtype is; the cast hands them back in their own.
    wide = {name: x.astype(jnp.float32) for name, x in {"beta": beta, **gate}.items()}
    return _run(kind, query, key, value, **wide, **segments)


def _segments(cu_seqlens: np.ndarray | None) -> dict[str, jax.Array]:
    """Packed sequences as it takes them: the number of each token's sequence, `[1, T]`."""
    if cu_seqlens is None:
        return {}
    lengths = np.diff(np.asarray(cu_seqlens))
    return {"segment_ids": jnp.asarray(np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)[None])}


def _run(kind: str, q: jax.Array, k: jax.Array, v: jax.Array, **inputs: Any) -> jax.Array:
    from jla.ops import linear_attention

    return linear_attention(kind, q, k, v, impl="mosaic_gpu", **inputs)[0]
