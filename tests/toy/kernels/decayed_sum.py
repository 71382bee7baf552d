"""The one definition of a call: y_t = decay * y_{t-1} + x_t along the second axis."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels import Signature


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SumProblem:
    """A checked call. Arrays are leaves; static fields belong to the tree's structure."""

    x: jax.Array  # [B, T, D]
    decay: float = dataclasses.field(default=1.0, metadata={"static": True})

    @classmethod
    def from_arguments(cls, x: Any, decay: Any = 1.0) -> SumProblem:
        x = jnp.asarray(x)
        if x.ndim != 3 or not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"x must be floats [batch, time, channels]; got {x.dtype}{list(x.shape)}.")
        if not isinstance(decay, (int, float)) or not 0 <= decay <= 1:
            raise ValueError(f"decay must be a number from 0 to 1; got {decay!r}.")
        return cls(x, float(decay))


@dataclasses.dataclass(frozen=True)
class SumConfig:
    """How a call runs. `block`: tokens at a time; every implementation reads it."""

    block: int = 16
    platform: str = "auto"
    backend: str = "any"


DECAYED_SUM = Signature("decayed_sum", SumProblem.from_arguments, SumConfig)
