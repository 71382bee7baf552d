"""Calls on arrays whose types carry shardings (`jax.make_mesh` with explicit axes).

Any axis but time may be split, as in `jax.nn`: each device computes its part. Inside, the compiler places the arrays, so that
no line of an algorithm has to say how its results lie; outside, results have the shardings that their axes came with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

Axis = tuple[str, int] | None  # of an argument: its name and which of its axes


def over_explicit_axes(
    run: Callable[..., Any],
    arrays: Mapping[str, jax.Array],
    results: Sequence[Sequence[Axis]],
    per_token: Sequence[str],
    advice: str = "",
) -> Callable[..., Any]:
    """`run`, made to take arrays of any mesh.

    Args:
        results: for each array that `run` returns, the argument's axis that each of its axes is; None: an axis of no argument.
        per_token: the arguments whose axis 1 is time, which cannot be split.
        advice: what else the caller has for a split time, as a sentence.

    Raises:
        ValueError: time is split.
    """
    mesh = jax.sharding.get_abstract_mesh()  # of the context, which arrays that lie on one device do not name
    specs = {name: jax.typeof(x).sharding for name, x in arrays.items()}
    mesh = next((s.mesh for s in specs.values() if not s.mesh.empty), mesh) if mesh.empty else mesh
    explicit = tuple(name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind is AxisType.Explicit)
    if not explicit:
        return run
    axes_of = {name: (*sharding.spec, *[None] * arrays[name].ndim)[: arrays[name].ndim] for name, sharding in specs.items()}
    for name in per_token:
        if name in axes_of and axes_of[name][1] is not None:
            raise ValueError(
                f"{name} is split over time (mesh axis {axes_of[name][1]!r}), which this call cannot compute: each token needs "
                f"what came before it. Split another axis, or gather time first with jax.sharding.reshard."
                f"{advice and f' {advice}'}"
            )
    placed = tuple(NamedSharding(mesh, PartitionSpec(*_distinct(axes_of, result))) for result in results)
    return jax.sharding.auto_axes(run, axes=explicit, out_sharding=placed)


def _distinct(axes_of: Mapping[str, Sequence[Any]], result: Sequence[Axis]) -> list[Any]:
    """The mesh axes of a result's axes; a mesh axis that two of them would have stays with the first."""
    found: list[Any] = []
    used: set[str] = set()
    for axis in result:
        split = None if axis is None else axes_of[axis[0]][axis[1]]
        names = set() if split is None else {split} if isinstance(split, str) else set(split)
        found.append(None if used & names else split)
        used |= names
    return found
