"""Whether two configurations computed the same thing."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util

from ejkernel.ops.invocation import is_float
from ejkernel.ops.kernel import Kernel

# Room for another order of summation and for the reduced-precision products of accelerators; a wrong kernel is far outside.
_TOLERANCES = {64: 1e-8, 32: 2e-3, 16: 1e-2, 8: 1e-1}


def default_tolerance(dtype: Any) -> float:
    """The largest error, relative to the result's size, that two right computations in this dtype may differ by."""
    if dtype == jnp.bfloat16:
        return 4e-2
    info = jnp.finfo(dtype)
    return _TOLERANCES.get(info.bits, 1e-1)


def nan_in(tree: Any) -> bool:
    """Whether any float of a pytree is NaN."""
    return any(is_float(leaf) and bool(jnp.isnan(leaf).any()) for leaf in tree_util.tree_leaves(tree))


def difference(kernel: Kernel[Any, Any], arguments: Iterable[Any], expected: Any, found: Any, what: str) -> str | None:
    """Why `found` is not the same result as `expected`; None when it is.

    Floats are compared by their largest error against the largest value, and by their mean square error against the mean
    square, both within the largest `kernel.tolerance(dtype)` of their own dtype and of those of the arguments that they were
    computed from: a float32 state of bfloat16 tokens is no more exact than they are. (Coarse on purpose: a wrong result is far
    outside.) Everything else must be equal.

    Args:
        arguments: arrays that the results were computed from.
        what: "result" or "gradient", for the reason.
    """
    least = max((kernel.tolerance(jnp.result_type(array)) for array in arguments if is_float(array)), default=0.0)
    structure: Any
    other: Any
    wanted, structure = tree_util.tree_flatten(expected)
    leaves, other = tree_util.tree_flatten(found)
    if structure != other:
        return f"its {what} has the structure {other}, not {structure}"
    for position, (right, leaf) in enumerate(zip(wanted, leaves, strict=True)):
        where = what if len(wanted) == 1 else f"{what} {position}"
        if (jnp.shape(right), jnp.result_type(right)) != (jnp.shape(leaf), jnp.result_type(leaf)):
            return f"its {where} is {_kind(leaf)}, not {_kind(right)}"
        reason = _leaf_difference(kernel, least, right, leaf, where)
        if reason is not None:
            return reason
    return None


def _leaf_difference(kernel: Kernel[Any, Any], least: float, right: Any, leaf: Any, where: str) -> str | None:
    dtype = jnp.result_type(right)
    if dtype == jax.dtypes.float0 or np.prod(jnp.shape(right)) == 0:
        return None
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        right, leaf = jax.random.key_data(right), jax.random.key_data(leaf)
    if not is_float(right):
        return None if bool((right == leaf).all()) else f"its {where} differs"
    nan, largest, rms = (float(value) for value in _errors(right, leaf))
    if nan:
        return f"its {where} is NaN or infinite where the heuristic's is not"
    limit = max(least, kernel.tolerance(dtype))
    if largest > limit or rms > limit:
        return f"its {where} is wrong: relative error {max(largest, rms):.2g}, allowed {limit:.2g}"
    return None


@jax.jit
def _errors(right: jax.Array, leaf: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Whether only one side is finite anywhere; the largest error over the largest value; the same of root mean squares."""
    with jax.numpy_dtype_promotion("standard"):  # where the program's own is strict, 16 bits would have no wider type
        wide = jnp.promote_types(right.dtype, jnp.float32)
    right, leaf = right.astype(wide), leaf.astype(wide)
    both = jnp.isfinite(right) & jnp.isfinite(leaf)
    unequal = ~both & (right != leaf)
    size, error = jnp.where(both, jnp.abs(right), 0), jnp.where(both, jnp.abs(right - leaf), 0)
    tiny = jnp.finfo(error.dtype).tiny
    largest = error.max() / jnp.maximum(size.max(), tiny)
    rms = jnp.sqrt((error**2).mean()) / jnp.maximum(jnp.sqrt((size**2).mean()), tiny)
    return unequal.any(), largest, rms


def _kind(leaf: Any) -> str:
    return f"{jnp.result_type(leaf)}{list(jnp.shape(leaf))}"
