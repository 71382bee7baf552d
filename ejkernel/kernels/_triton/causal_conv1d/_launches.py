"""The launches of the short causal convolution."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel._search import how_many_up_to
from ejkernel.callib import cdiv, triton_call
from ejkernel.kernels._triton.causal_conv1d._kernels import convolve, convolve_back

Array = jax.Array


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a call is cut into programs.

    Attributes:
        steps: tokens that a run goes through.
        ahead: tokens that are read at a time; it divides `steps`.
        runs: of a program, one for each warp.
        channels: of a program.
    """

    steps: int
    ahead: int
    runs: int = 4
    channels: int = 128

    def constants(self, width: int, channels: int, activation: str | None) -> dict[str, Any]:
        """Of a kernel; more than four taps leave registers for half the channels."""
        BC = self.channels if width <= 4 else self.channels // 2
        return {"C": channels, "W": width, "SILU": activation == "silu", "AHEAD": self.ahead, "G": self.runs, "BC": BC}


FORWARD, BACKWARD = Tiles(steps=32, ahead=8), Tiles(steps=64, ahead=4)


def forward(activation: str | None, args: dict[str, Array]) -> dict[str, Array]:
    """y `[B, T, C]` in x's dtype, of x, weight and those of bias and offsets that are given."""
    x, weight = args["x"], args["weight"]
    (B, T, C), tiles = x.shape, FORWARD
    constants = tiles.constants(weight.shape[0], C, activation)
    return triton_call(
        arguments=_arguments(args),
        out_shape={"y": jax.ShapeDtypeStruct(x.shape, x.dtype)},
        kernel=convolve, grid=(cdiv(C, constants["BC"]) * B * cdiv(T, tiles.runs * tiles.steps),), num_warps=tiles.runs,
        RUN=tiles.steps, **constants,
    )  # fmt: skip


def gradients(activation: str | None, args: dict[str, Array]) -> dict[str, Array]:
    """dx, and as sums of each tile of tokens dweight `[B, tiles, W, C]` and dbias `[B, tiles, C]`, of a call with dy."""
    x, (W, C) = args["x"], args["weight"].shape
    (B, T, _), tiles = x.shape, BACKWARD
    run = tiles.steps - (W - 1)  # a run goes on for W - 1 tokens after its own
    count, constants = cdiv(T, tiles.runs * run), tiles.constants(W, C, activation)
    of = lambda *dims: jax.ShapeDtypeStruct((B, count, *dims), np.float32)
    out_shape = {"dx": jax.ShapeDtypeStruct(x.shape, x.dtype), "dweight": of(W, C), "dbias": of(C)}
    return triton_call(
        arguments={**_arguments(args), "dy": args["dy"]},
        out_shape={**out_shape, "dbias": out_shape["dbias"] if "bias" in args else None},
        kernel=convolve_back, grid=(cdiv(C, constants["BC"]) * B * count,), num_warps=tiles.runs, RUN=run, **constants,
    )  # fmt: skip


def _arguments(args: dict[str, Array]) -> dict[str, Any]:
    T = args["x"].shape[1]
    return {**{name: args.get(name) for name in ("x", "weight", "bias")}, "place": _places(T, args.get("offsets")), "T": T}


def _places(T: int, offsets: Array | None) -> Array | None:
    """`[T]`: which token of its sequence each is; -1 after the last sequence."""
    if offsets is None:
        return None
    token = jnp.arange(T, dtype=jnp.int32)
    sequence = jnp.minimum(how_many_up_to(offsets[1:], token), offsets.shape[0] - 2)
    return jnp.where(token < offsets[-1], token - offsets[sequence], -1)
