"""How a call of foreign kernels splits over a mesh whose axes XLA's partitioner places.

The partitioner cannot look into a kernel. Unless it is told how the call splits, it gathers every operand and computes the
whole call on every device. `partitioned` tells it (`jax.experimental.custom_partitioning`): batch and heads may be split, and
each device then runs the kernels on its part. Arrays that are split over other axes are gathered, with a warning.

A trace does not see how arrays are split. So questions about axes are asked only when the program is lowered for several
devices.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import ArrayMapping, CompoundFactor, SdyShardingRule, custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ejkernel.callib import HostCallbacks, instead_of_launching

Roles = tuple[str, ...]  # what each axis of an array is, such as ("batch", "time", "heads", "key channels")
SPLIT = ("batch", "heads")  # the roles of axes that may be split
INSIDE = ""  # the role of an axis that is no argument's


class GatheredWarning(UserWarning):
    """Arrays of a call are gathered on every device, since they are split over an axis that the call cannot split."""


@dataclasses.dataclass(frozen=True)
class Axes:
    """What the axes of a function's arguments and results are.

    Attributes:
        names: of the arguments' leaves, for warnings.
        arguments, results: the roles of their leaves, in order.
        sums: for each result the roles that it is a sum over, such as the gradient of what all rows of a batch share. None
            for none at all.
    """

    names: tuple[str, ...]
    arguments: tuple[Roles, ...]
    results: tuple[Roles, ...]
    sums: tuple[Roles, ...] | None = None


def split_by_xla() -> bool:
    """Whether XLA's partitioner decides where a call that is traced now computes, not types or `shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    told = bool(set(mesh.axis_types) & {AxisType.Manual, AxisType.Explicit})
    return not told and not (mesh.empty and jax.device_count() == 1)


def partitioned(function: Callable[[Any], Any], args: Any, axes: Callable[[], Axes]) -> Any:
    """`function(args)`, pytrees of arrays, computed part by part where the program runs on several devices.

    Args:
        axes: what the axes are; asked for only when the program is lowered for several devices.
    """
    if not split_by_xla():
        return function(args)  # inside `shard_map`, where types say how arrays are split, or on one device
    leaves, tree = jax.tree.flatten(args)
    results: list[Any] = []

    def flat(*leaves: Any) -> list[Any]:
        # A program of its own keeps its constants (tables of a kernel's blocks) to itself; `custom_partitioning` takes none.
        made, structure = jax.tree.flatten(jax.jit(function)(jax.tree.unflatten(tree, leaves)))
        results[:] = structure, tuple(x.shape for x in made)
        return made

    split, parts = _Split(tuple(x.shape for x in leaves), lambda: results[1], axes), HostCallbacks()
    call = custom_partitioning(flat)

    def partition(mesh: Any, arguments: Any, _: Any) -> Any:
        placed = split.placed(mesh, arguments)

        def flat_part(*leaves: Any) -> list[Any]:
            made = jax.tree.leaves(function(jax.tree.unflatten(tree, leaves)))
            return [_summed(x, axes) for x, axes in zip(made, placed.sums, strict=True)]

        return mesh, parts.within(flat_part), placed.results, placed.arguments

    call.def_partition(partition, infer_sharding_from_operands=split.infer, sharding_rule=split.rule)
    made = call(*parts.bound(leaves))
    return jax.tree.unflatten(results[0], made)


def roles_of_results(function: Callable[[Any], Any], args: Any, roles: Sequence[Roles]) -> Any:
    """The roles of the results' axes, found by what grows with the arguments' axes. Nothing is launched.

    Args:
        roles: of the leaves of `args`.
    """
    leaves, tree = jax.tree.flatten(args)

    def shapes(doubled: str | None) -> Any:
        grown = [
            jax.ShapeDtypeStruct([2 * n if role == doubled else n for n, role in zip(x.shape, own, strict=True)], x.dtype)
            for x, own in zip(leaves, roles, strict=True)
        ]
        with instead_of_launching(lambda launch: None):
            return jax.eval_shape(lambda *xs: function(jax.tree.unflatten(tree, xs)), *grown)

    once, grown = shapes(None), {role: shapes(role) for role in SPLIT}

    def found(x: Any, *larger: Any) -> Roles:
        sizes = zip(x.shape, *(y.shape for y in larger), strict=True)
        grows = ([role for role, n in zip(SPLIT, more, strict=True) if n == 2 * size] for size, *more in sizes)
        return tuple(each[0] if len(each) == 1 else INSIDE for each in grows)

    return jax.tree.map(found, once, *grown.values())


class _Placed(NamedTuple):
    """Where the arrays of a device's part lie, and over which mesh axes each of its results is still to be summed."""

    results: list[NamedSharding]
    arguments: tuple[NamedSharding, ...]
    sums: list[tuple[str, ...]]


@dataclasses.dataclass(frozen=True)
class _Split:
    """How a function of arrays splits; results and axes are known when it has been traced."""

    arguments: tuple[tuple[int, ...], ...]  # shapes
    ask_results: Callable[[], tuple[tuple[int, ...], ...]]
    ask_axes: Callable[[], Axes]

    @property
    def results(self) -> tuple[tuple[int, ...], ...]:
        return self.ask_results()

    @functools.cached_property
    def axes(self) -> Axes:
        return self.ask_axes()

    @functools.cached_property
    def most(self) -> dict[str, int]:
        """Into how many parts each role may be split: every axis of that role holds a multiple of it, heads whole groups."""
        sizes: dict[str, int] = dict.fromkeys(SPLIT, 0)
        every = zip((*self.arguments, *self.results), (*self.axes.arguments, *self.axes.results), strict=True)
        for shape, roles in every:
            for size, role in zip(shape, roles, strict=True):
                if role in sizes:
                    sizes[role] = math.gcd(sizes[role], size)
        return sizes

    def rule(self, *_: Any) -> SdyShardingRule:
        """For Shardy: axes of one role and size are split alike; every other axis has to do with itself alone.

        Heads of query and key have different numbers, and a mesh axis that splits one may not split the other: such arrays are
        not tied to each other here, but where the parts are chosen (`chosen`).
        """
        rows, whole = self.most["batch"], False
        rests: dict[str, int] = {}
        numbers = itertools.count()

        def factor(size: int, role: str) -> Any:
            nonlocal whole
            own = f"x{next(numbers)}"
            if self.most.get(role, 0) < 2:
                return own
            if role == "heads":
                return f"h{size}"
            if size == rows:
                whole = True
                return "b"
            rests[own] = size // rows
            return CompoundFactor("b", own)  # such as chunks, in the order of the batch

        def mappings(shapes: Sequence[tuple[int, ...]], roles: Sequence[Roles]) -> tuple[ArrayMapping, ...]:
            return tuple(ArrayMapping(*map(factor, shape, own)) for shape, own in zip(shapes, roles, strict=True))

        made = mappings(self.arguments, self.axes.arguments), mappings(self.results, self.axes.results)
        sizes: dict[str, Any] = rests if whole or not rests else {**rests, "b": rows}
        return SdyShardingRule(made[0], made[1], **sizes)

    def placed(self, mesh: Any, args: Sequence[Any]) -> _Placed:
        """How each device computes its part."""
        given = [_axes_of(x) for x in args]
        split = self.chosen(mesh, given)
        self.warn(given, split)
        place = lambda roles: NamedSharding(mesh, PartitionSpec(*(split.get(role) for role in roles)))
        axes = self.axes
        over = lambda roles: tuple(name for role in roles for name in split.get(role, ()))
        return _Placed(
            [place(roles) for roles in axes.results],
            tuple(place(roles) for roles in axes.arguments),
            [over(roles) for roles in axes.sums or [()] * len(axes.results)],
        )

    def infer(self, mesh: Any, args: Sequence[Any], _: Any) -> list[NamedSharding]:
        """For XLA's older partitioner."""
        return self.placed(mesh, args).results

    def chosen(self, mesh: Any, given: Sequence[Sequence[tuple[str, ...]]]) -> dict[str, tuple[str, ...]]:
        """The mesh axes of each role: those of the largest argument that is split over it, as far as they divide it."""
        split: dict[str, tuple[str, ...]] = {}
        largest = sorted(range(len(given)), key=lambda i: -math.prod(self.arguments[i]))
        for role in SPLIT:
            of_role = (
                tuple(name for name in axes if not any(name in used for used in split.values()))
                for i in largest
                for axes, own in zip(given[i], self.axes.arguments[i], strict=True)
                if own == role
            )
            axes = next(filter(None, of_role), ())
            while axes and self.most[role] % math.prod(mesh.shape[name] for name in axes):
                axes = axes[:-1]
            if axes:
                split[role] = axes
        return split

    def warn(self, given: Sequence[Sequence[tuple[str, ...]]], split: dict[str, tuple[str, ...]]) -> None:
        found: dict[str, list[str]] = {}
        for name, roles, own in zip(self.axes.names, self.axes.arguments, given, strict=True):
            for role, axes in zip(roles, own, strict=True):
                if role != INSIDE and set(axes) - set(split.get(role, ())):
                    found.setdefault(role, []).append(name)
        for role, names in found.items():
            _gathered(role, names, self.most.get(role))


def _summed(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The sum of all devices' parts, in float32 at least."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    return lax.psum(x.astype(wide), axes).astype(x.dtype) if axes else x


def _axes_of(x: Any) -> list[tuple[str, ...]]:
    """The mesh axes over which each axis of an array is split."""
    spec = x.sharding.spec if isinstance(x.sharding, NamedSharding) else ()
    named = [() if axes is None else axes if isinstance(axes, tuple) else (axes,) for axes in spec]
    return named + [()] * (len(x.shape) - len(named))


_given: set[str] = set()
_lock = threading.Lock()


def _gathered(role: str, names: Sequence[str], most: int | None) -> None:
    """One warning for each role, since arrays of one call, and of its gradient, are split alike."""
    with _lock:
        if role in _given:
            return
        _given.add(role)
    why = "which the kernels need whole" if most is None else f"which can be split into {most} at most (whole groups of heads)"
    warnings.warn(
        f"{', '.join(dict.fromkeys(names))}: split over {role}, {why}, and so gathered on every device. Split batch and heads "
        f"instead: [batch, time, heads, channels] as PartitionSpec('data', None, 'model'), states as PartitionSpec('data', "
        f"'model'). To split time, use jax.shard_map: the recurrences take sequence_axis there, and docs/several_devices.md "
        f"has a recipe for softmax attention.",
        GatheredWarning,
        stacklevel=2,
    )
