"""The delta rule by flash-linear-attention, where it is installed: what the triton platform is measured against.

Nothing here runs without torch, flash-linear-attention and an NVIDIA GPU; importing this module needs none of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ejkernel.testing.flash_linear import FlashLinear


class FlashDelta(FlashLinear):
    """One call on torch copies of JAX arrays: `chunk_delta_rule`, `chunk_gated_delta_rule` or `chunk_kda` by the gate."""

    def __init__(
        self,
        arrays: Mapping[str, jax.Array],
        cotangent: jax.Array,
        cu_seqlens: np.ndarray | None = None,
        *,
        skip_guard: bool = False,
    ):
        """
        Args:
            arrays: query, key, value, beta and g by the names of `gated_delta_rule`.
            skip_guard: as for `FlashLinear`.
        """
        self._prepare(arrays, cotangent, cu_seqlens, skip_guard)

    def _run(self) -> Any:
        from fla.ops.delta_rule import chunk_delta_rule
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule
        from fla.ops.kda import chunk_kda

        q, k, v, beta = (self.tensors[name] for name in ("query", "key", "value", "beta"))
        g = self.tensors.get("g")
        if g is None:
            return chunk_delta_rule(q, k, v, beta, **self.packed)[0]
        return (chunk_kda if g.ndim == 4 else chunk_gated_delta_rule)(q, k, v, g, beta, **self.packed)[0]
