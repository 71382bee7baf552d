"""Calls on arrays whose types carry shardings (`jax.make_mesh` with explicit axes).

Batch and heads may be split, as in `jax.nn`: each device computes its part. Inside, the compiler places the arrays, so that
no line of the algorithm has to say how its results lie; outside, output and state have the shardings that their axes came with.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

PER_TOKEN = ("query", "key", "value", "beta", "g")


def over_explicit_axes(run: Callable[..., Any], arrays: Mapping[str, jax.Array], packed: bool) -> Callable[..., Any]:
    """`run`, which returns (output `[B, T, H, V]`, state `[N, H, K, V]`), made to take arrays of any mesh."""
    shardings = {name: jax.typeof(x).sharding for name, x in arrays.items()}
    mesh = jax.sharding.get_abstract_mesh()  # of the context, which arrays that lie on one device do not name
    mesh = shardings["value"].mesh if mesh.empty else mesh
    explicit = tuple(name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind is AxisType.Explicit)
    if not explicit:
        return run
    spec = {name: (*sharding.spec, *[None] * 4)[:4] for name, sharding in shardings.items()}
    for name in PER_TOKEN:
        if name in spec and spec[name][1] is not None:
            raise ValueError(
                f"{name} is split over time (mesh axis {spec[name][1]!r}), which this call cannot compute: each token needs the "
                f"state of those before it. Split batch or heads, or gather time first: "
                f"jax.sharding.reshard({name}, P(batch, None, heads))."
            )
    batch, _, heads, channels = spec["value"]
    output = NamedSharding(mesh, PartitionSpec(batch, None, heads, channels))
    rows = spec["key"][3] if spec["key"][3] != channels else None
    state = NamedSharding(mesh, PartitionSpec(None if packed else batch, heads, rows, channels))
    return jax.sharding.auto_axes(run, axes=explicit, out_sharding=(output, state))
