"""Checks of values where arrays are split between four devices: run by `test_value_checks.py` in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

if __name__ == "__main__":  # collecting doctests imports this file, too
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=1"

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ejkernel import check_values, gla_attention

X = jnp.ones((2, 8, 2, 4))
WRONG = (-X).at[1, 5, 1, 2].set(0.5)
P = PartitionSpec


def complaint(run: Callable[..., Any], *arrays: jax.Array) -> str:
    """What a call says of its arguments; empty where it runs."""
    try:
        jax.block_until_ready(run(*arrays))
    except Exception as problem:  # a ValueError, or JAX's runtime error around it
        return str(problem)
    return ""


def main() -> None:
    for kind in (AxisType.Explicit, AxisType.Auto):
        mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2)
        x, good, wrong = (jax.device_put(a, NamedSharding(mesh, P("data", None, "model"))) for a in (X, -X, WRONG))
        with jax.set_mesh(mesh), check_values():
            for run in (gla_attention, jax.jit(gla_attention)):
                assert not (said := complaint(run, x, x, x, good)), said
                assert "g is 0.5 at [1, 5, 1, 2]" in complaint(run, x, x, x, wrong)
    mesh = jax.make_mesh((4,), ("time",), axis_types=(AxisType.Auto,))
    local = lambda q, g, offsets: gla_attention(q, q, q, g, cu_seqlens=offsets, sequence_axis="time")
    specs = (P(None, "time"), P(None, "time"), P())
    split = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(None, "time")))
    with check_values():  # what is right: where one shard raises the others wait, until JAX ends the process
        assert not (said := complaint(split, X[:1], -X[:1], jnp.array([0, 3, 8]))), (
            said
        )  # a wrong one would leave the other shards waiting


if __name__ == "__main__":
    main()
