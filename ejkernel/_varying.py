"""Types of arrays under `shard_map`: loops need carries that vary over the same mesh axes as what they are updated with."""

from __future__ import annotations

import jax
from jax import lax


def varying_axes(*arrays: jax.Array) -> frozenset[str]:
    """The mesh axes over which any of the arrays varies."""
    return frozenset().union(*(jax.typeof(x).mat.varying for x in arrays))


def vary(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """The array, marked as varying over these mesh axes too."""
    missing = tuple(sorted(axes - varying_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x
