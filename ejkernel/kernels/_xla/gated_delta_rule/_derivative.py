"""One derivative rule for forward and reverse mode, under every JAX transformation.

`jax.custom_vjp` gives a function its own reverse mode and takes forward mode away. Here the rule of a `jax.custom_jvp` calls
`linear_map(fun, transpose, residuals, tangents)`: forward mode runs `fun`, reverse mode runs `transpose`. Both are made of
loops of known length, which JAX can differentiate again in either mode.

Arguments go through `alike` first. Under `vmap` of some of them all become mapped, and inside `shard_map` all vary over the
same mesh axes; JAX's own rules then add up the gradients of what was shared.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from ejkernel._varying import vary, varying_axes

FlatFunction = Callable[..., Sequence[Any]]

alike_p = Primitive("alike")
alike_p.multiple_results = True
linear_map_p = Primitive("linear_map_of_loops")
linear_map_p.multiple_results = True


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


def linear_map(
    fun: FlatFunction, transpose: FlatFunction, residuals: Sequence[jax.Array], tangents: Sequence[jax.Array]
) -> list[jax.Array]:
    """`fun(*residuals, *tangents)`, linear in the tangents.

    Args:
        fun: returns a sequence of arrays.
        transpose: `transpose(*residuals, *cotangents)` returns one array per tangent. Both must be hashable, and equal for
            equal work, so that compiled code is found again.
    """
    return linear_map_p.bind(*residuals, *tangents, fun=fun, transpose=transpose, residual_count=len(residuals))


@dataclasses.dataclass(frozen=True)
class _Mapped:
    fun: FlatFunction
    in_axes: tuple[int | None, ...]
    size: int

    def __call__(self, *args: jax.Array) -> Sequence[Any]:
        return jax.vmap(lambda *rows: list(self.fun(*rows)), self.in_axes, axis_size=self.size)(*args)


@linear_map_p.def_impl
def _run(*args: Any, fun: FlatFunction, transpose: FlatFunction, residual_count: int) -> list[Any]:
    del transpose, residual_count
    return list(fun(*args))


@linear_map_p.def_abstract_eval
def _abstract(*avals: Any, fun: FlatFunction, transpose: FlatFunction, residual_count: int) -> Sequence[Any]:
    del transpose, residual_count
    return jax.make_jaxpr(lambda *args: list(fun(*args)))(*avals).out_avals


mlir.register_lowering(linear_map_p, mlir.lower_fun(_run, multiple_results=True))


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list[Any], list[Any]]:
    count, fun = params["residual_count"], params["fun"]
    out = linear_map_p.bind(*primals, **params)
    parts: list[list[Any]] = []
    if any(not isinstance(t, ad.Zero) for t in tangents[count:]):
        filled = [ad.instantiate_zeros(t) for t in tangents[count:]]
        parts.append(linear_map_p.bind(*primals[:count], *filled, **params))
    moving = [i for i in range(count) if not isinstance(tangents[i], ad.Zero)]
    if moving:

        def of_moving(*some: Any) -> list[Any]:
            args = list(primals)
            for i, x in zip(moving, some, strict=True):
                args[i] = x
            return list(fun(*args))

        parts.append(jax.jvp(of_moving, tuple(primals[i] for i in moving), tuple(tangents[i] for i in moving))[1])
    if not parts:
        return out, [jnp.zeros_like(x) for x in out]
    return out, parts[0] if len(parts) == 1 else [x + y for x, y in zip(*parts, strict=True)]


def _transpose(
    cotangents: Sequence[Any], *args: Any, fun: FlatFunction, transpose: FlatFunction, residual_count: int
) -> list[Any]:
    residuals, linear = args[:residual_count], args[residual_count:]
    filled = [ad.instantiate_zeros(ct) for ct in cotangents]
    out = linear_map_p.bind(*residuals, *filled, fun=transpose, transpose=fun, residual_count=residual_count)
    return [None] * residual_count + [ct if ad.is_undefined_primal(x) else None for ct, x in zip(out, linear, strict=True)]


def _batch(
    args: Sequence[Any], axes: Sequence[int | None], *, fun: FlatFunction, transpose: FlatFunction, residual_count: int
) -> tuple[list[Any], list[int]]:
    size = next(x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None)
    residual_axes = tuple(axes[:residual_count])
    # Every linear argument gets the mapped axis, so that its cotangent has one too.
    linear = [
        jnp.broadcast_to(x[None], (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(args[residual_count:], axes[residual_count:], strict=True)
    ]
    mapped = _Mapped(fun, (*residual_axes, *[0] * len(linear)), size)
    outputs = len(jax.eval_shape(mapped, *args[:residual_count], *linear))
    out = linear_map_p.bind(
        *args[:residual_count],
        *linear,
        fun=mapped,
        transpose=_Mapped(transpose, (*residual_axes, *[0] * outputs), size),
        residual_count=residual_count,
    )
    return out, [0] * len(out)


ad.primitive_jvps[linear_map_p] = _jvp
ad.primitive_transposes[linear_map_p] = _transpose
batching.primitive_batchers[linear_map_p] = _batch
