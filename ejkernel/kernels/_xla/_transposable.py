"""A linear map with a transpose of its own, under every JAX transformation.

`jax.custom_vjp` gives a function its own reverse mode and takes forward mode away. Here the derivative rule of an operation
calls `linear_map(fun, transpose, residuals, tangents)`: forward mode runs `fun`, reverse mode runs `transpose`, `vmap` maps
both, and differentiating once more differentiates `fun.plain()`, the same function written so that JAX can.

Under `vmap` an output stays unmapped unless it depends on something that is mapped, exactly as it does without a derivative:
`jax.custom_jvp` does not notice when the two disagree. The transpose then gets one cotangent for all mapped elements.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

Axes = tuple[int | None, ...]


class FlatFunction(Protocol):
    """A function of arrays. It must be hashable, and equal for equal work, so that compiled code is found again."""

    def __call__(self, *args: jax.Array) -> Sequence[jax.Array]: ...

    def plain(self) -> FlatFunction:
        """The same function by operations that JAX can differentiate any number of times, in both modes."""
        ...

    def varies(self, mapped: Sequence[bool]) -> tuple[bool, ...]:
        """Which outputs depend on an argument that is mapped."""
        ...


linear_map_p = Primitive("linear_map")
linear_map_p.multiple_results = True


def linear_map(
    fun: FlatFunction, transpose: FlatFunction, residuals: Sequence[jax.Array], tangents: Sequence[jax.Array]
) -> list[jax.Array]:
    """`fun(*residuals, *tangents)`, linear in the tangents.

    Args:
        transpose: `transpose(*residuals, *cotangents)` returns one array per tangent.
    """
    return linear_map_p.bind(*residuals, *tangents, fun=fun, transpose=transpose, residual_count=len(residuals))


def call(fun: FlatFunction, *args: jax.Array) -> list[jax.Array]:
    """`fun(*args)`, whose outputs are mapped under `vmap` as those of a `linear_map` are."""
    return linear_map_p.bind(*args, fun=fun, transpose=None, residual_count=len(args))


@dataclasses.dataclass(frozen=True)
class _Mapped:
    """`vmap` of a function."""

    fun: FlatFunction
    in_axes: Axes
    out_axes: Axes

    def __call__(self, *args: jax.Array) -> Sequence[Any]:
        return jax.vmap(lambda *rows: tuple(self.fun(*rows)), self.in_axes, self.out_axes)(*args)

    def plain(self) -> FlatFunction:
        return dataclasses.replace(self, fun=self.fun.plain())

    def varies(self, mapped: Sequence[bool]) -> tuple[bool, ...]:
        return self.fun.varies(mapped)


@dataclasses.dataclass(frozen=True)
class _MappedTranspose:
    """The transpose of a `_Mapped` linear map, from the transpose of its function.

    What is shared by all elements adds up over them: as an argument of the map, by a sum of the cotangents that the elements
    find for it; as an output, by a cotangent that only the first element hands on.
    """

    transpose: FlatFunction
    size: int
    residual_axes: Axes
    linear_axes: Axes
    out_axes: Axes

    def __call__(self, *args: jax.Array) -> Sequence[Any]:
        residuals, cotangents = args[: len(self.residual_axes)], args[len(self.residual_axes) :]
        is_first = jnp.arange(self.size, dtype=jnp.int32) == 0
        cotangents = tuple(
            jnp.where(is_first.reshape(-1, *[1] * ct.ndim), ct[None], jnp.zeros((), ct.dtype)) if axis is None else ct
            for ct, axis in zip(cotangents, self.out_axes, strict=True)
        )
        mapped = jax.vmap(lambda *rows: tuple(self.transpose(*rows)), (*self.residual_axes, *[0] * len(cotangents)))
        found = mapped(*residuals, *cotangents)
        return [
            jnp.sum(ct, 0, dtype=ct.dtype) if axis is None else jnp.moveaxis(ct, 0, axis)
            for ct, axis in zip(found, self.linear_axes, strict=True)
        ]

    def plain(self) -> FlatFunction:
        return dataclasses.replace(self, transpose=self.transpose.plain())

    def varies(self, mapped: Sequence[bool]) -> tuple[bool, ...]:
        return (any(mapped),) * len(self.linear_axes)


@linear_map_p.def_impl
def _run(*args: Any, fun: FlatFunction, transpose: FlatFunction | None, residual_count: int) -> list[Any]:
    del transpose, residual_count
    return list(fun(*args))


@linear_map_p.def_abstract_eval
def _abstract(*avals: Any, fun: FlatFunction, transpose: FlatFunction | None, residual_count: int) -> Sequence[Any]:
    del transpose, residual_count
    return jax.make_jaxpr(lambda *args: list(fun(*args)))(*avals).out_avals


mlir.register_lowering(linear_map_p, mlir.lower_fun(_run, multiple_results=True))


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[list[Any], list[Any]]:
    count, out = params["residual_count"], linear_map_p.bind(*primals, **params)
    parts: list[list[Any]] = []
    if any(not isinstance(t, ad.Zero) for t in tangents[count:]):
        filled = [ad.instantiate_zeros(t) for t in tangents[count:]]
        parts.append(linear_map_p.bind(*primals[:count], *filled, **params))
    moving = [i for i in range(count) if not isinstance(tangents[i], ad.Zero)]
    if moving:
        plain = params["fun"].plain()

        def of_moving(*some: Any) -> list[Any]:
            args = list(primals)
            for i, x in zip(moving, some, strict=True):
                args[i] = x
            return list(plain(*args))

        parts.append(jax.jvp(of_moving, tuple(primals[i] for i in moving), tuple(tangents[i] for i in moving))[1])
    return out, parts[0] if len(parts) == 1 else [x + y for x, y in zip(*parts, strict=True)]


def _transpose(
    cotangents: Sequence[Any], *args: Any, fun: FlatFunction, transpose: FlatFunction, residual_count: int
) -> list[Any]:
    residuals, linear = args[:residual_count], args[residual_count:]
    filled = [ad.instantiate_zeros(ct) for ct in cotangents]
    out = linear_map_p.bind(*residuals, *filled, fun=transpose, transpose=fun, residual_count=residual_count)
    return [None] * residual_count + [ct if ad.is_undefined_primal(x) else None for ct, x in zip(out, linear, strict=True)]


def _batch(
    args: Sequence[Any],
    axes: Sequence[int | None],
    *,
    fun: FlatFunction,
    transpose: FlatFunction | None,
    residual_count: int,
) -> Any:
    size = next(x.shape[axis] for x, axis in zip(args, axes, strict=True) if axis is not None)
    out_axes = tuple(0 if varies else None for varies in fun.varies([axis is not None for axis in axes]))
    split = tuple(axes[:residual_count]), tuple(axes[residual_count:])
    out = linear_map_p.bind(
        *args,
        fun=_Mapped(fun, tuple(axes), out_axes),
        transpose=None if transpose is None else _MappedTranspose(transpose, size, *split, out_axes),
        residual_count=residual_count,
    )
    return out, list(out_axes)


ad.primitive_jvps[linear_map_p] = _jvp
ad.primitive_transposes[linear_map_p] = _transpose
batching.primitive_batchers[linear_map_p] = _batch
