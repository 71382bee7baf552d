"""A linear map with a transpose of its own, under every JAX transformation.

`jax.custom_vjp` gives a function its own reverse mode and takes forward mode away. Here the derivative rule of an operation
calls `linear_map(fun, transpose, residuals, tangents)`: forward mode runs `fun`, reverse mode runs `transpose`, `vmap` maps
both, and differentiating once more differentiates whichever ran.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

FlatFunction = Callable[..., Sequence[Any]]

linear_map_p = Primitive("linear_map")
linear_map_p.multiple_results = True


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

    def __call__(self, *args: jax.Array) -> Sequence[Any]:
        return jax.vmap(self.fun, self.in_axes)(*args)


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
    count = params["residual_count"]
    filled = [ad.instantiate_zeros(t) for t in tangents]
    if all(isinstance(t, ad.Zero) for t in tangents[:count]):
        out = linear_map_p.bind(*primals, **params)
        return out, linear_map_p.bind(*primals[:count], *filled[count:], **params)
    fun = params["fun"]
    return jax.jvp(lambda *args: list(fun(*args)), tuple(primals), tuple(filled))


def _transpose(
    cotangents: Sequence[Any], *args: Any, fun: FlatFunction, transpose: FlatFunction, residual_count: int
) -> list[Any]:
    residuals, linear = args[:residual_count], args[residual_count:]
    filled = [ad.instantiate_zeros(ct) for ct in cotangents]
    out = linear_map_p.bind(*residuals, *filled, fun=transpose, transpose=fun, residual_count=residual_count)
    return [None] * residual_count + [ct if ad.is_undefined_primal(x) else None for ct, x in zip(out, linear, strict=True)]


def _batch(
    args: Sequence[Any], axes: Sequence[int | None], *, fun: FlatFunction, transpose: FlatFunction, residual_count: int
) -> Any:
    size = next(x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None)
    residual_axes = tuple(axes[:residual_count])
    # Every linear argument gets the mapped axis, so that its cotangent has one too.
    linear = [
        jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(args[residual_count:], axes[residual_count:], strict=True)
    ]
    outputs = len(jax.eval_shape(_Mapped(fun, (*residual_axes, *(0 for _ in linear))), *args[:residual_count], *linear))
    out = linear_map_p.bind(
        *args[:residual_count],
        *linear,
        fun=_Mapped(fun, (*residual_axes, *(0 for _ in linear))),
        transpose=_Mapped(transpose, (*residual_axes, *(0 for _ in range(outputs)))),
        residual_count=residual_count,
    )
    return out, [0] * len(out)


ad.primitive_jvps[linear_map_p] = _jvp
ad.primitive_transposes[linear_map_p] = _transpose
batching.primitive_batchers[linear_map_p] = _batch
