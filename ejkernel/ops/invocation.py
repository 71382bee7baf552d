"""`Invocation`: one call of a kernel, seen as abstract shapes and static values, and the key made from them."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util

from ejkernel._device import (
    Device,
    default_device,
    describe,
    inner,
    jax_device_of,
    may_be_split,
    on_device,
    placed,
    planned,
    underneath,
)
from ejkernel.ops.kernel import Cfg, Kernel, Out, named_arguments
from ejkernel.ops.key import bucket, environment, settings, stable_text, structure_text

_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
_PLAIN = (*_ARRAYS, bool, int, float, str, type, type(None))  # arguments without arrays of other libraries


def is_array(leaf: Any) -> bool:
    """Whether a leaf of the arguments is data; everything else is a static value."""
    return isinstance(leaf, _ARRAYS)


def with_arrays_of_others(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with numpy's or JAX's arrays in place of those of other libraries, which say how they become one.

    As static values they would be compiled in: a call with the same object would not see what has been written to it since.
    """
    if all(issubclass(kind, _PLAIN) for kind in {*map(type, args), *map(type, kwargs.values())}):  # as in nearly every call
        return args, kwargs
    leaves, treedef = tree_util.tree_flatten((args, kwargs))
    leaves = [_converted(leaf) if _is_array_of_others(type(leaf)) else leaf for leaf in leaves]
    args, kwargs = tree_util.tree_unflatten(treedef, leaves)
    return args, kwargs


def _is_array_of_others(kind: type) -> bool:
    convertible = hasattr(kind, "__jax_array__") or hasattr(kind, "__array__")
    return convertible and not issubclass(kind, (*_ARRAYS, type))  # a dtype may be a class, whose values are arrays


def _converted(leaf: Any) -> Any:
    """An array, or what is none as it is: the operation says by name what is wrong with it."""
    try:
        return leaf.__jax_array__() if hasattr(leaf, "__jax_array__") else np.asarray(leaf)
    except (TypeError, ValueError, RuntimeError):
        return leaf


def is_float(leaf: Any) -> bool:
    """Whether an array or scalar holds real or complex floats, and so can have a gradient."""
    return jnp.issubdtype(jnp.result_type(leaf), jnp.inexact)


@dataclass(frozen=True)
class Layout:
    """Where the arrays of a call are among its arguments.

    Attributes:
        treedef: the structure of `(args, kwargs)`.
        static: the leaves in order, as `(type, value)`; None where an array is.
    """

    treedef: Any
    static: tuple[tuple[type, Any] | None, ...]

    def rebuild(self, arrays: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """`(args, kwargs)` with these arrays in place."""
        rest = iter(arrays)
        leaves = [next(rest) if entry is None else entry[1] for entry in self.static]
        args, kwargs = tree_util.tree_unflatten(self.treedef, leaves)
        return args, kwargs


def split(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], Layout]:
    """The arrays of a call and where they were."""
    leaves, treedef = tree_util.tree_flatten((args, dict(kwargs)))
    arrays = [leaf for leaf in leaves if is_array(leaf)]
    return arrays, Layout(treedef, tuple(None if is_array(leaf) else (type(leaf), leaf) for leaf in leaves))


@dataclass(frozen=True)
class MappedAxis:
    """One `jax.vmap` around a call: how many elements, and at which axis of each array; None where it is shared."""

    size: int
    axes: tuple[int | None, ...]


@dataclass(frozen=True, eq=False)
class Invocation(Generic[Cfg, Out]):
    """One call of a kernel: what decides which configuration it runs with.

    Attributes:
        kernel: the operation.
        args, kwargs: the arguments as given, `jax.ShapeDtypeStruct` in place of every array.
        device: where the call runs.
        mapped: the `jax.vmap`s that are visible around the call, innermost first; the arrays above are one element's.
        split: whether XLA may split the arrays between devices; True also where that is not known.
    """

    kernel: Kernel[Cfg, Out]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    device: jax.Device = field(default_factory=default_device, repr=False)
    mapped: tuple[MappedAxis, ...] = ()
    split: bool = True

    @classmethod
    def of(cls, kernel: Kernel[Cfg, Out], *args: Any, **kwargs: Any) -> Invocation[Cfg, Out]:
        """The invocation of `kernel` with these arguments: concrete, traced or abstract arrays and static values."""
        kernel.check_identity()
        arrays, layout = split(args, kwargs)
        abstract = layout.rebuild([_abstract(array) for array in arrays])
        return cls(kernel, *abstract, jax_device_of(arrays), mapped_axes(arrays), may_be_split(arrays))

    @functools.cached_property
    def arguments(self) -> dict[str, Any]:
        """The arguments by the name of the kernel's parameters, defaults included."""
        return named_arguments(self.kernel, self.args, self.kwargs)

    @functools.cached_property
    def target(self) -> Device:
        """What kernels are planned for: the device, or the one that an `on_device` around the call names."""
        return placed(planned() or describe(self.device), self.split)

    @functools.cached_property
    def environment(self) -> dict[str, str]:
        """What a measurement depends on besides the call: also the device it was planned for, where that is another one."""
        here = environment(self.device)
        if dataclasses.replace(self.target, split=None) == describe(self.device):
            return here
        return {**here, "backend": self.target.backend, "device": self.target.kind, "planned on": here["device"]}

    @functools.cached_property
    def problem(self) -> Any:
        """What the kernel makes of the arguments, on shapes alone: what the choice of a configuration depends on."""
        if type(self.kernel).problem is Kernel.problem:
            return self.arguments
        arrays, layout = split(self.args, self.kwargs)

        def make(*arrays: Any) -> Any:
            args, kwargs = layout.rebuild(arrays)
            return self.kernel.problem(*args, **kwargs)

        with on_device(self.target):
            return jax.eval_shape(make, *(jax.ShapeDtypeStruct(array.shape, array.dtype) for array in arrays))

    @functools.cached_property
    def shapes(self) -> dict[str, str]:
        """Every array of the problem as text, such as `{"query": "float32[2,~512,4,64]"}`; `~` marks a bucketed length."""
        found: dict[str, str] = {}
        for path, leaf in tree_util.tree_flatten_with_path(self.problem)[0]:
            if is_array(leaf):
                name = tree_util.keystr(path, simple=True, separator=".")
                found[name] = self._shape_text(name, leaf)
        return found

    @functools.cached_property
    def static(self) -> dict[str, str]:
        """Every static leaf of the problem as text, and what else the kernel tells calls apart by."""
        leaves = tree_util.tree_flatten_with_path(self.problem)[0]
        found = {
            tree_util.keystr(path, simple=True, separator="."): stable_text(leaf, tree_util.keystr(path))
            for path, leaf in leaves
            if not is_array(leaf)
        }
        return {**found, **self.kernel.key_fields(self)}

    @functools.cached_property
    def placement(self) -> dict[str, str]:
        """How array arguments are split between devices and mapped by `jax.vmap`, by name, for those that are."""
        position = {id(array): number for number, array in enumerate(split(self.args, self.kwargs)[0])}
        found: dict[str, str] = {}
        for path, leaf in tree_util.tree_flatten_with_path(self.arguments)[0]:
            if id(leaf) in position and (text := self._placement_text(leaf, position[id(leaf)])):
                found[tree_util.keystr(path, simple=True, separator=".")] = text
        return found

    @functools.cached_property
    def call(self) -> str:
        """The part of the key that does not depend on device and versions."""
        return json.dumps(self._call(), sort_keys=True, separators=(",", ":"))

    @functools.cached_property
    def key(self) -> str:
        """What a tuned configuration is stored under: readable JSON, the same in every process."""
        surroundings = {**self.environment, **self.kernel.library_versions(self)}
        return json.dumps({**self._call(), "environment": surroundings}, sort_keys=True, separators=(",", ":"))

    def _call(self) -> dict[str, Any]:
        made: dict[str, Any] = {
            "op": self.kernel.op_id,
            "version": self.kernel.version,
            "arrays": self.shapes,
            "static": self.static,
            "structure": structure_text(tree_util.tree_structure(self.problem), f"an argument of {self.kernel.op_id!r}"),
        }
        own = {name: value for name, value in vars(self.kernel).items() if name not in ("op_id", "version")}
        extra = {
            "placement": self.placement,
            "kernel": stable_text(own, f"an attribute of {self.kernel!r}") if own else "",
            "settings": settings(),
        }
        return {**made, **{name: value for name, value in extra.items() if value}}

    def _shape_text(self, name: str, leaf: Any) -> str:
        shape = tuple(leaf.shape)
        lengths = {axis % len(shape) for axis in self.kernel.length_axes(name, shape)} if shape else set()
        sizes = (f"~{bucket(size)}" if axis in lengths else str(size) for axis, size in enumerate(shape))
        return f"{leaf.dtype}[{','.join(sizes)}]"

    def _placement_text(self, leaf: Any, position: int) -> str:
        sharding = getattr(leaf, "sharding", None)
        words = [] if sharding is None else [f"split {'x'.join(map(str, parts(tuple(leaf.shape), sharding)))}"]
        axes = ((level, mapped.size, mapped.axes[position]) for level, mapped in enumerate(self.mapped))
        return " ".join([*words, *(f"vmap{level} {size}@{axis}" for level, size, axis in axes if axis is not None)])


def _abstract(array: Any) -> jax.ShapeDtypeStruct:
    """The shape and dtype of an array.

    Those of numpy with 64 bits have the dtype that JAX will give them. It would warn of such a struct, and `np.cumsum` makes
    offsets of 64 bits.
    """
    is_numpy = isinstance(array, (np.ndarray, np.generic))
    dtype = jax.dtypes.canonicalize_dtype(array.dtype) if is_numpy else array.dtype
    return jax.ShapeDtypeStruct(array.shape, dtype, sharding=_visible_sharding(array))


def _visible_sharding(array: Any) -> Any:
    """The named sharding of an array that is split between devices; None where it is not, or not visible."""
    value = underneath(array)
    if isinstance(array, jax.core.Tracer) and (value is None or getattr(value, "ndim", 0) != array.ndim):
        sharding = getattr(array.aval, "sharding", None)
    else:
        sharding = getattr(value, "sharding", None)
    return None if all(part == 1 for part in parts(array.shape, sharding)) else sharding


def parts(shape: tuple[int, ...], sharding: Any) -> tuple[int, ...]:
    """Into how many parts a sharding splits each axis of an array. All ones where it is none that names its axes."""
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return (1,) * len(shape)
    sizes = dict(sharding.mesh.shape)
    named = [() if axes is None else axes if isinstance(axes, tuple) else (axes,) for axes in sharding.spec]
    ways = [math.prod(sizes.get(axis, 1) for axis in axes) for axes in named]
    return tuple(ways + [1] * (len(shape) - len(ways)))


def mapped_axes(arrays: Sequence[Any]) -> tuple[MappedAxis, ...]:
    """The vmaps around a call, innermost first.

    Tracers are looked through the way `jax.vmap` and `jax.grad` nest them; under `jit` nothing further is visible.
    """
    levels: dict[int, dict[int, tuple[int, int]]] = {}
    for position, array in sorted(enumerate(arrays), key=lambda item: -_depth(item[1])):
        while isinstance(array, jax.core.Tracer):
            axis = getattr(array, "batch_dim", None)
            if isinstance(axis, int):
                levels.setdefault(id(array._trace), {})[position] = (array.val.shape[axis], axis)
            array = inner(array)
    mapped = []
    for level in levels.values():
        size = next(iter(level.values()))[0]
        mapped.append(MappedAxis(size, tuple(level[i][1] if i in level else None for i in range(len(arrays)))))
    return tuple(mapped)


def _depth(array: Any) -> int:
    return 1 + _depth(inner(array)) if isinstance(array, jax.core.Tracer) else 0
