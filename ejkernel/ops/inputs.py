"""Random arguments to measure a call with."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.ops.invocation import Invocation, parts, split


def random_arguments(inv: Invocation[Any, Any], key: jax.Array) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`(args, kwargs)` of the invocation's shapes and dtypes: normal floats, zero integers, False booleans.

    A sharded array gets the shape of one shard, since one device's share of the work is what is measured.
    """
    arrays, layout = split(inv.args, inv.kwargs)
    keys = jax.random.split(key, max(1, len(arrays)))
    return layout.rebuild([random_array(local_shape(array), array.dtype, k) for array, k in zip(arrays, keys, strict=False)])


def random_array(shape: tuple[int, ...], dtype: Any, key: jax.Array) -> jax.Array:
    """Normal values for floats (both parts for complex numbers), fresh keys for key arrays, zeros for all else."""
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        return jax.random.clone(jax.random.split(key, shape)) if shape else key
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jax.random.normal(key, shape, dtype)
    if jnp.issubdtype(dtype, jnp.floating):
        drawn = dtype if jnp.finfo(dtype).bits >= 16 else jnp.float32  # nothing draws in 8 bits
        return jax.random.normal(key, shape, drawn).astype(dtype)
    return jnp.zeros(shape, dtype)


def local_shape(array: Any) -> tuple[int, ...]:
    """The shape of one device's part of an array."""
    split_into = parts(array.shape, getattr(array, "sharding", None))
    return tuple(-(-size // ways) for size, ways in zip(array.shape, split_into, strict=True))
