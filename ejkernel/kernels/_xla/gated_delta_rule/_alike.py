"""Arrays made alike before an operation with a derivative rule: mapped, and varying over mesh axes, all or none.

Under `vmap` of some of them all become mapped, and inside `shard_map` all vary over the same mesh axes; JAX's own rules then
add up the gradients of what was shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ejkernel._varying import vary, varying_axes

alike_p = Primitive("alike")
alike_p.multiple_results = True


def alike(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """The arrays, mapped under `vmap` if any of them is, and varying over the mesh axes that any of them varies over.

    An operation with a derivative rule needs that: its results are then mapped alike with and without their derivatives.
    """
    axes = varying_axes(*arrays)
    return alike_p.bind(*(vary(x, axes) for x in arrays))


alike_p.def_impl(lambda *arrays: list(arrays))
alike_p.def_abstract_eval(lambda *avals: list(avals))
mlir.register_lowering(alike_p, mlir.lower_fun(lambda *arrays: list(arrays), multiple_results=True))


def _alike_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    return alike_p.bind(*primals), list(tangents)


def _alike_batch(args: Sequence[Any], axes: Sequence[int | None]) -> tuple[list[Any], list[int]]:
    size = next(x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None)
    mapped = [
        jnp.broadcast_to(x[None], (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(args, axes, strict=True)
    ]
    return alike_p.bind(*mapped), [0] * len(mapped)


ad.primitive_jvps[alike_p] = _alike_jvp
batching.primitive_batchers[alike_p] = _alike_batch
