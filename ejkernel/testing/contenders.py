"""Ways to compute a call that are measured beside each other: this library's, and what people would use instead."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ejkernel.testing.timing import directed

Arrays = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Contender:
    """One way to compute an operation.

    Attributes:
        prepare: gives, for a direction and arrays by name, a function of the output's gradient that starts the work. What it
            gives is the output, with direction "forward+backward" the pair `(output, gradients by name)`.
        wait: returns when what that function gave is there.
        absent: why it cannot run here; None when it can.
        name: as tables show it; a rival's is the one that its record has it under.
        platform: what this library was asked to run on; None for all others.
        library: the distribution that it comes with, by the name that pip knows; None where that is JAX.
    """

    prepare: Callable[[str, Arrays], Callable[[jax.Array], Any]]
    wait: Callable[[Any], Any] = jax.block_until_ready
    absent: str | None = None
    name: str = ""
    platform: str | None = None
    library: str | None = None


def jitted(function: Callable[..., jax.Array], absent: str | None = None, library: str | None = None) -> Contender:
    """A function of arrays by name that gives the output, compiled by `jax.jit` and differentiated by JAX."""

    def prepare(direction: str, arrays: Arrays) -> Callable[[jax.Array], Any]:
        compiled = jax.jit(directed(function, direction))
        return lambda cotangent: compiled(arrays, cotangent)

    return Contender(prepare, absent=absent, library=library)


def fetched(result: Any, direction: str) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """A result of any contender, JAX's or torch's, as `(output, gradients by name)`."""
    output, gradients = result if direction != "forward" else (result, {})
    return _numpy(output), {name: _numpy(x) for name, x in gradients.items()}


def _numpy(array: Any) -> np.ndarray:
    return np.asarray(array) if isinstance(array, jax.Array) else array.float().cpu().numpy()
