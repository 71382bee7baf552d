"""The record of the toy: with it `ejkernel verify`, `bench` and `tune` know the operation."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.testing.compare import LINEAR_TOLERANCES, reference_settings
from ejkernel.testing.contenders import Contender, jitted
from ejkernel.testing.record import Record
from tests.toy.kernels.decayed_sum import SumProblem
from tests.toy.operation import DecayedSum, decayed_sum

DECAY = 0.9  # of the calls that are timed


def reference(x: Any, decay: float = DECAY) -> jax.Array:
    """The sum as its definition says it, one token after another."""

    def step(last: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        last = decay * last + row
        return last, last

    start = jnp.zeros((x.shape[0], x.shape[2]), x.dtype)
    return jnp.moveaxis(jax.lax.scan(step, start, jnp.moveaxis(x, 1, 0))[1], 0, 1)


@dataclasses.dataclass(frozen=True)
class SumCase:
    """One call that every implementation must get right."""

    name: str
    shape: tuple[int, int, int]
    decay: float
    dtype: str = "float32"

    def __str__(self) -> str:
        return self.name

    @property
    def tolerance(self) -> tuple[float, float]:
        return LINEAR_TOLERANCES[self.dtype]

    @property
    def arrays(self) -> tuple[jax.Array, jax.Array]:
        """x, and the gradient of the output."""
        x, dy = (np.random.default_rng(seed).normal(size=self.shape) for seed in range(2))
        return jnp.asarray(x, self.dtype), jnp.asarray(dy, self.dtype)

    @property
    def problem(self) -> SumProblem:
        return SumProblem.from_arguments(self.arrays[0], self.decay)

    def values(self, function: Callable[..., jax.Array]) -> dict[str, jax.Array]:
        return {"output": jax.jit(lambda x: function(x, self.decay))(self.arrays[0])}

    def evaluate(self, function: Callable[..., jax.Array]) -> dict[str, jax.Array]:
        return _with_gradient(lambda x: function(x, self.decay), *self.arrays)

    def expected(self) -> dict[str, np.ndarray]:
        arrays = [np.asarray(array, np.float64) for array in self.arrays]
        with reference_settings():
            found = _with_gradient(lambda x: reference(x, self.decay), *arrays)
        return {name: np.asarray(array) for name, array in found.items()}


def _with_gradient(function: Callable[[Any], jax.Array], x: Any, dy: Any) -> dict[str, jax.Array]:
    @jax.jit
    def both(x: Any, dy: Any) -> dict[str, jax.Array]:
        y, pull = jax.vjp(function, x)
        return {"output": y, "dx": pull(dy)[0]}

    return both(x, dy)


CASES = [
    SumCase("plain", (2, 37, 3), 0.9),
    SumCase("one-token", (1, 1, 4), 0.5),
    SumCase("keeps-nothing", (2, 16, 2), 0.0),
    SumCase("keeps-everything", (1, 50, 1), 1.0),
    SumCase("wide", (1, 5, 200), 0.7),
    SumCase("no-tokens", (2, 0, 3), 0.9),
]


@dataclasses.dataclass(frozen=True)
class SumShape:
    """The sizes of one call, written `BxTxD[:dtype]`."""

    batch: int
    time: int
    channels: int
    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{self.batch}x{self.time}x{self.channels}:{self.dtype}"


def _by_hand(record: Record[SumShape]) -> Contender:
    return jitted(reference)


class SumRecord(Record[SumShape]):
    """Everything about `decayed_sum` beside its kernels."""

    def parse(self, text: str, gates: tuple[str, ...], dtype: str) -> SumShape:
        found = re.fullmatch(r"(\d+)x(\d+)x(\d+)(?::(float32|bfloat16))?", text)
        if found is None:
            raise ValueError(f"a shape of decayed_sum must be BxTxD, then :float32 or :bfloat16 if any; got {text!r}.")
        B, T, D = map(int, found.groups()[:3])
        return SumShape(B, T, D, found[4] or dtype)

    def usual_shapes(self, backend: str) -> Sequence[str]:
        return ["1x16x4", "1x32x4"]

    def abstract(self, shape: SumShape) -> dict[str, jax.ShapeDtypeStruct]:
        return {"x": self.output(shape)}

    def output(self, shape: SumShape) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((shape.batch, shape.time, shape.channels), jnp.dtype(shape.dtype))

    def operations(self, shape: SumShape, direction: str) -> int:
        return shape.batch * shape.time * shape.channels * (2 if direction == "forward" else 4)

    def cases(self) -> Sequence[SumCase]:
        return CASES

    def reference(self, **arrays: Any) -> jax.Array:
        return reference(**arrays)


DECAYED_SUM = SumRecord(operation=decayed_sum, kernel=DecayedSum, options={"decay": DECAY}, rivals={"scan": _by_hand})
