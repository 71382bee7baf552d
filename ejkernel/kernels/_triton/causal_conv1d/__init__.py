"""The short causal convolution on Triton: NVIDIA GPUs from compute capability 8.0."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

import jax
import jax.numpy as jnp

from ejkernel._device import Device
from ejkernel.kernels._linear.problem import DECODED_TOKENS
from ejkernel.parallel.partition import split_by_xla

LEAST_CAPABILITY = 80
MAX_WIDTH = 8  # taps whose inputs and gradients fit in registers


def covers(device: Device, arrays: Mapping[str, jax.Array]) -> bool:
    """Whether the kernels take a call; XLA takes all others. A decoder's step is one fused kernel there.

    XLA also takes what it may split over devices: its own form splits over every axis, and kernels inside a linear map cannot
    say how they split.
    """
    if split_by_xla():
        return False
    x, weight = arrays["x"], arrays["weight"]
    if device.capability is None or device.capability < LEAST_CAPABILITY or importlib.util.find_spec("triton") is None:
        return False
    if not all(isinstance(n, int) for array in arrays.values() for n in array.shape):  # symbolic sizes
        return False
    return x.shape[1] > DECODED_TOKENS and weight.shape[0] <= MAX_WIDTH and all(a.dtype != jnp.float64 for a in arrays.values())
