"""What a call cannot be faster than: its bytes over the memory's rate, or its operations over the arithmetic's.

Bytes: every input is read once and every result written once; the backward pass reads the inputs and the output's gradient
again. Operations: those of the recurrence itself (softmax attention: of the pairs that a causal mask keeps), which chunked and
blockwise kernels exceed. Rates are measured on this device: a copy of as many bytes, and a matrix product in the call's dtype.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.ops.key import bucket
from ejkernel.testing.shapes import Shape
from ejkernel.testing.timing import best_time

_LARGEST_COPY = 1 << 30


@dataclasses.dataclass(frozen=True)
class Floor:
    """The least time of a call, in seconds, and what bounds it: "bytes" or "operations"."""

    seconds: float
    bound: str


def bandwidth(size: int) -> float:
    """Bytes per second of a copy that moves about `size` bytes, measured once per process and power of two.

    Copies of the same size, since what fits a cache is faster than what does not.
    """
    least = 1 << (20 if jax.default_backend() == "cpu" else 28)  # smaller ones would measure how fast calls are started
    return _rate(_copy_rate, bucket(min(max(size, least), _LARGEST_COPY)))


def arithmetic(dtype: str) -> float:
    """Multiplications and additions per second of the fastest of some matrix products, once per process and dtype."""
    return _rate(_product_rate, dtype)


def refresh() -> None:
    """Measures every rate that was asked for again, and keeps the better: other work on the machine only ever takes away."""
    for name, before in list(_rates.items()):
        measure, argument = name
        _rates[name] = max(before, measure(argument))


_rates: dict[tuple[Callable[[Any], float], Any], float] = {}


def _rate(measure: Callable[[Any], float], argument: Any) -> float:
    if (measure, argument) not in _rates:
        _rates[measure, argument] = measure(argument)
    return _rates[measure, argument]


def _copy_rate(size: int) -> float:
    copy = jax.jit(lambda x: x + 1, donate_argnums=0)  # in place: new pages would cost more than the copy
    values = [copy(jnp.zeros(size // 8, jnp.float32))]  # half of the bytes are read, half are written

    def call() -> jax.Array:
        values[0] = copy(values[0])
        return values[0]

    return size / best_time(call, seconds=0.2)


def _product_rate(dtype: str) -> float:
    product = jax.jit(lambda x: x @ x)

    def rate(n: int) -> float:
        square = jnp.ones((n, n), dtype)
        jax.block_until_ready(product(square))
        return 2 * n**3 / best_time(lambda: product(square), seconds=0.3)

    return max(map(rate, (512, 1024, 2048) if jax.default_backend() == "cpu" else (4096, 8192)))


def compulsory_bytes(shape: Shape, direction: str) -> int:
    """Bytes that a call must move.

    >>> compulsory_bytes(Shape(1, 8, 1, 4, 4), "forward")  # q, k, v and the output, 8 x 4 numbers of four bytes each
    512
    """
    inputs = sum(array.size * array.dtype.itemsize for array in shape.abstract().values())
    output = shape.batch * shape.time * shape.heads * shape.value_channels * jnp.dtype(shape.dtype).itemsize
    return inputs + output if direction == "forward" else 2 * (inputs + output) + inputs


def operations(shape: Shape, direction: str, linear: bool) -> int:
    """Multiplications and additions that a call must do.

    Linear: per token and head 4 K V forward (the state's update and its reading), 10 K V more backward (the states again, the
    gradients of q, k, v, and the state's own). Softmax, causal: half of 2 T^2 (K + V) forward, 2.5 times that more backward.
    """
    rows = shape.batch * shape.heads * shape.time
    if linear:
        return rows * shape.key_channels * shape.value_channels * (4 if direction == "forward" else 14)
    forward = rows * shape.time * (shape.key_channels + shape.value_channels)
    return forward if direction == "forward" else forward * 7 // 2


def floor(shape: Shape, direction: str, linear: bool) -> Floor:
    """The least time of a call on this device, by measured rates."""
    moved = compulsory_bytes(shape, direction)
    by_bytes = moved / bandwidth(moved)
    by_operations = operations(shape, direction, linear) / arithmetic(shape.dtype)
    return Floor(max(by_bytes, by_operations), "bytes" if by_bytes >= by_operations else "operations")
