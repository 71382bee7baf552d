"""Meshes with explicit axes, where an array's type says over which of them it is split.

Code written for such types would have to name the sharding of every loop's start. So an operation runs with these axes left to
XLA's partitioner, as all axes are in a mesh without explicit ones, and its outputs get the types that its inputs imply.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

Roles = Sequence[str]  # what each axis of an array is, such as ("batch", "time", "heads", "key channels")


def explicit_mesh(*arrays: jax.Array) -> Any:
    """The mesh with explicit axes that the arrays are on; None where there is none.

    That no array is split over it says nothing: under `vmap` an element's type does not show over what the elements are.
    """
    for x in arrays:
        mesh = jax.typeof(x).sharding.mesh
        if not mesh.empty and AxisType.Explicit in mesh.axis_types:
            return mesh
    return None


def inside_shard_map() -> bool:
    """Whether `jax.shard_map` is around a call, its own or the user's.

    There JAX runs no custom gradient with symbolic zeros but inside a `jit`, so such calls bring one along.
    """
    return AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types


def repeat(x: jax.Array, count: int, axis: int) -> jax.Array:
    """`jnp.repeat` along an axis that may be split."""
    axis %= x.ndim
    wide = jnp.broadcast_to(jnp.expand_dims(x, axis + 1), (*x.shape[: axis + 1], count, *x.shape[axis + 1 :]))
    return wide.reshape(*x.shape[:axis], x.shape[axis] * count, *x.shape[axis + 1 :])


def run_partitioned(
    function: Callable[[dict[str, jax.Array]], Any],
    arrays: Mapping[str, jax.Array],
    roles: Mapping[str, Roles],
    outputs: Sequence[Roles],
    free: Sequence[str],
    advice: str,
    by_hand: bool = False,
) -> Any:
    """`function(arrays)`, a tuple of arrays, on a mesh with or without explicit axes.

    Args:
        roles: what the axes of each array are; those of one name are split alike.
        outputs: the same of each output.
        free: the axes that may be split.
        advice: what to do instead of splitting another axis, for the error.
        by_hand: give the function each device's part (`jax.shard_map`), instead of leaving the explicit axes to XLA's
            partitioner, to which foreign kernels are opaque.
    """
    mesh = explicit_mesh(*arrays.values())
    if mesh is None:
        return function(dict(arrays))
    found: dict[str, Any] = {}
    for name, x in arrays.items():
        spec = jax.typeof(x).sharding.spec
        for role, axes in zip(roles[name], spec, strict=True):
            if axes is None:
                continue
            if role not in free:
                raise ValueError(f"{name} {_text(roles[name])} must not be split over {role}; it is, over {axes!r}. {advice}")
            other, known = found.setdefault(role, (name, axes))
            if known != axes:
                raise ValueError(
                    f"{name} and {other} must be split alike over {role}; got mesh axes {axes!r} and {known!r}. "
                    f"Use jax.sharding.reshard on one of them."
                )
    spec_of = lambda output: PartitionSpec(*(found[role][1] if role in found else None for role in output))
    if by_hand:
        specs = {name: spec_of(roles[name]) for name in arrays}
        placed = {name: jax.sharding.reshard(x, NamedSharding(mesh, specs[name])) for name, x in arrays.items()}
        return jax.shard_map(function, mesh=mesh, in_specs=(specs,), out_specs=tuple(map(spec_of, outputs)))(placed)
    shardings = tuple(NamedSharding(mesh, spec_of(output)) for output in outputs)
    explicit = tuple(name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind is AxisType.Explicit)
    return jax.sharding.auto_axes(function, axes=explicit, out_sharding=shardings)(dict(arrays))


def _text(roles: Roles) -> str:
    return f"[{', '.join(roles)}]"
