"""What users call: the operation, and the kernel that the executor picks a configuration for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax

from ejkernel.modules.base import RegistryKernel, default_executor
from tests.toy.kernels import registry
from tests.toy.kernels.decayed_sum import DECAYED_SUM, SumConfig


class DecayedSum(RegistryKernel[SumConfig, jax.Array]):
    """`decayed_sum` as the executor sees it."""

    signature = DECAYED_SUM
    registry = registry

    def results(self, found: jax.Array, named: Mapping[str, Any]) -> jax.Array:
        return found

    def length_axes(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (1,) if name == "x" else ()


@DecayedSum.called_by_users
def decayed_sum(x: Any, decay: float = 1.0, *, platform: str | None = None, cfg: SumConfig | None = None) -> jax.Array:
    """y_t = decay * y_{t-1} + x_t over the second axis of `x [B, T, D]`."""
    return default_executor()(DecayedSum(), x, decay, platform=platform, _cfg=cfg)
