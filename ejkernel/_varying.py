"""Types of arrays under `shard_map`: loops need carries that vary over the same mesh axes as what they are updated with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def varying_axes(*arrays: jax.Array) -> frozenset[str]:
    """The mesh axes over which any of the arrays varies."""
    return frozenset().union(*(jax.typeof(x).mat.varying for x in arrays))


def vary(x: jax.Array, axes: frozenset[str]) -> jax.Array:
    """The array, marked as varying over these mesh axes too."""
    missing = tuple(sorted(axes - varying_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def alike(arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """The arrays, each marked as varying over the mesh axes that any of them varies over.

    An operation with a derivative of its own needs this of its arguments: a gradient then varies as its argument does, and
    the derivative of the marking is the sum over the mesh that the gradient of a replicated argument needs.
    """
    axes = varying_axes(*arrays.values())
    return {name: vary(x, axes) for name, x in arrays.items()}


def constant(x: np.ndarray, dtype: Any = None) -> jax.Array:
    """The array as a constant of the program, for use inside `lax.cond`.

    JAX turns a plain constant of a branch into an operand of the `lax.cond`. Under a `vmap` over the condition operands are
    selected by it and then vary as it does, so that the branch cannot mark them as varying again and JAX raises an error. A
    function of no arguments keeps its constants, and compiles to nothing but the constant.
    """
    return jax.jit(lambda: jnp.asarray(x, dtype))()
