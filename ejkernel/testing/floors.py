"""What a call cannot be faster than: its bytes over the memory's rate, or its operations over the arithmetic's.

How many bytes and operations a call must have its operation's record says. Rates are measured on this device: a copy of as many
bytes, and a matrix product in the call's dtype.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel._device import backend_of, default_device
from ejkernel.ops.key import bucket
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
    least = 1 << (20 if _on_cpu() else 28)  # smaller ones would measure how fast calls are started
    return _rate(_copy_rate, bucket(min(max(size, least), _LARGEST_COPY)))


def arithmetic(dtype: str) -> float:
    """Multiplications and additions per second of the fastest of some matrix products, once per process and dtype."""
    return _rate(_product_rate, dtype)


def refresh() -> None:
    """Measures every rate that was asked for again, and keeps the better: other work on the machine only ever takes away."""
    for name, before in list(_rates.items()):
        measure, argument = name
        _rates[name] = max(before, measure(argument))


def _on_cpu() -> bool:
    return backend_of(default_device()) == "cpu"


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

    return max(map(rate, (512, 1024, 2048) if _on_cpu() else (4096, 8192)))


def floor(moved: int, operations: int, dtype: str) -> Floor:
    """The least time of a call that must move so many bytes and do so many operations, by measured rates."""
    by_bytes, by_operations = moved / bandwidth(moved), operations / arithmetic(dtype)
    return Floor(max(by_bytes, by_operations), "bytes" if by_bytes >= by_operations else "operations")
