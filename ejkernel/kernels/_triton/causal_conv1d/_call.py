"""The launches of the short causal convolution, and its derivative rule."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import triton

from ejkernel.callib import cdiv, triton_call
from ejkernel.kernels._triton.causal_conv1d._kernels import convolve, convolve_back

Array = jax.Array
ROWS, CHANNELS, TILES = 16, 128, 16  # rows and channels of a tile; row tiles whose weight gradients one program sums up


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def convolved(activation: str | None, x: Array, weight: Array, bias: Array | None, cu_seqlens: Array | None) -> Array:
    """y `[B, T, C]` in x's dtype; weight `[W, C]`, bias `[C]` or None, cu_seqlens `[N + 1]` or None (B is 1 then)."""
    sizes = _sizes(activation, x, weight)
    made = triton_call(
        arguments={"x": x, "w": weight, "bias": bias, "place": _places(x, cu_seqlens)},
        out_shape={"y": jax.ShapeDtypeStruct(x.shape, x.dtype)},
        kernel=convolve, grid=(cdiv(sizes["C"], CHANNELS) * cdiv(sizes["ROWS"], ROWS),), **sizes,
    )  # fmt: skip
    return made["y"]


def _forward(
    activation: str | None, x: Array, weight: Array, bias: Array | None, cu_seqlens: Array | None
) -> tuple[Array, tuple[Any, ...]]:
    return convolved(activation, x, weight, bias, cu_seqlens), (x, weight, bias, cu_seqlens)


def _backward(activation: str | None, kept: tuple[Any, ...], dy: Array) -> tuple[Any, ...]:
    x, weight, bias, cu_seqlens = kept
    sizes = _sizes(activation, x, weight)
    groups, (W, C) = cdiv(sizes["ROWS"], ROWS * TILES), weight.shape
    shape = lambda *dims: jax.ShapeDtypeStruct(dims, np.float32)
    found = triton_call(
        arguments={"x": x, "w": weight, "bias": bias, "place": _places(x, cu_seqlens), "dy": dy},
        out_shape={"dx": jax.ShapeDtypeStruct(x.shape, x.dtype), "dw": shape(groups, W, C), "dbias": shape(groups, C)},
        kernel=convolve_back, grid=(cdiv(C, CHANNELS) * groups,), WP=triton.next_power_of_2(W), TILES=TILES, **sizes,
    )  # fmt: skip
    dbias = None if bias is None else jnp.sum(found["dbias"], 0).astype(bias.dtype)
    no_offsets = None if cu_seqlens is None else np.zeros(cu_seqlens.shape, jax.dtypes.float0)
    return found["dx"], jnp.sum(found["dw"], 0).astype(weight.dtype), dbias, no_offsets


convolved.defvjp(_forward, _backward)


def _sizes(activation: str | None, x: Array, weight: Array) -> dict[str, Any]:
    B, T, C = x.shape
    silu = activation == "silu"
    return {"ROWS": B * T, "T": T, "C": C, "W": weight.shape[0], "SILU": silu, "BT": ROWS, "BC": CHANNELS}


def _places(x: Array, cu_seqlens: Array | None) -> Array | None:
    """`[T]`: which token of its sequence each is; -1 after the last sequence."""
    if cu_seqlens is None:
        return None
    token = jnp.arange(x.shape[1], dtype=jnp.int32)
    sequence = jnp.searchsorted(cu_seqlens[1:], token, side="right", method="compare_all").astype(jnp.int32)
    return jnp.where(token < cu_seqlens[-1], token - cu_seqlens[jnp.minimum(sequence, cu_seqlens.shape[0] - 2)], -1)
