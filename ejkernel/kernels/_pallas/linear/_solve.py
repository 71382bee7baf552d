"""A call solved along its route, with its own gradient: for every recurrence on TPUs."""

from __future__ import annotations

import functools
from typing import Any

import jax
import numpy as np

from ejkernel._reverse_only import differentiable_once, not_differentiable, of_platform
from ejkernel._varying import vary, varying_axes
from ejkernel.kernels._linear.batching import foldable
from ejkernel.kernels._pallas.linear._mesh import over_explicit_axes, split
from ejkernel.kernels._pallas.linear._route import Given, Route

Array = jax.Array
Arrays = dict[str, Array]
REFUSALS = of_platform("pallas")


def solve_along(route: Route, arrays: Arrays, cu_seqlens: Array | None) -> tuple[Array, Array]:
    """(output [B, T, H, V], final state [N, H, K, V]); arrays: those of a problem's `differentiable`."""
    # Under `shard_map` an array that is the same on all shards is made to vary like the others first: the gradient of that step
    # is the sum over the shards, which the array's own type asks for.
    axes = varying_axes(*arrays.values(), *(() if cu_seqlens is None else (cu_seqlens,)))
    return over_explicit_axes(
        lambda arrays, cu_seqlens: _solve(route, differentiable_once(arrays, REFUSALS), cu_seqlens),
        {name: vary(x, axes) for name, x in arrays.items()},
        None if cu_seqlens is None else vary(cu_seqlens, axes),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _solve(route: Route, arrays: Arrays, cu_seqlens: Array | None) -> tuple[Array, Array]:
    return _forward(route, False, arrays, cu_seqlens)[:2]


def _solve_forward(route: Route, arrays: Arrays, cu_seqlens: Array | None) -> Any:
    output, final, saved = _forward(route, True, not_differentiable(arrays, REFUSALS), cu_seqlens)
    return (output, final), (arrays, cu_seqlens, saved)


def _solve_backward(route: Route, residuals: Any, cotangents: tuple[Array, Array]) -> Any:
    arrays, cu_seqlens, saved = residuals
    doutput, dfinal = not_differentiable(cotangents, REFUSALS)
    grads = _backward(route, arrays, cu_seqlens, saved, doutput, dfinal)
    return grads, None if cu_seqlens is None else np.zeros(cu_seqlens.shape, jax.dtypes.float0)


_solve.defvjp(_solve_forward, _solve_backward)


# Jitted with the route as a static argument, so that calls outside `jit` trace and compile once for each shape.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward(route: Route, keep: bool, arrays: Arrays, cu_seqlens: Array | None) -> tuple[Array, Array, Arrays]:
    """(output, final state, what the gradient starts from if it is to be kept)."""

    def run(arrays: Arrays, cu_seqlens: Array | None) -> dict[str, Any]:
        output, final, saved = route.forward(Given(arrays, cu_seqlens), keep)
        return {"output": output, "final": final, "saved": saved}

    leaves = ("final", "output", *(route.kept if keep else ()))
    made = foldable(lambda **args: split(run, leaves, **args), arrays=arrays, cu_seqlens=cu_seqlens)
    return made["output"], made["final"], made["saved"]


@functools.partial(jax.jit, static_argnums=(0,))
def _backward(
    route: Route, arrays: Arrays, cu_seqlens: Array | None, saved: Arrays, doutput: Array, dfinal: Array
) -> dict[str, Array]:
    def run(arrays: Arrays, cu_seqlens: Array | None, **results: Any) -> Arrays:
        return route.backward(Given(arrays, cu_seqlens), **results)

    names = tuple(sorted(arrays))  # of arrays alone: `vmap` keeps the function, and would keep what it holds
    split_run = lambda **args: split(run, names, **args)
    return foldable(split_run, arrays=arrays, cu_seqlens=cu_seqlens, saved=saved, doutput=doutput, dfinal=dfinal)
