"""One Pallas kernel as a function of named arrays, so that a missing gate is a missing name and not another signature."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from ejkernel._varying import vary, varying_axes
from ejkernel.kernels._pallas._chips import Chip

Refs = Mapping[str, Any]


class Input(NamedTuple):
    """An array and the block of it that a step of the grid reads."""

    array: jax.Array
    spec: pl.BlockSpec


class Output(NamedTuple):
    """A result and the block of it that a step of the grid writes; kept in VMEM while the block stays the same."""

    shape: tuple[int, ...]
    dtype: Any
    spec: pl.BlockSpec


class Launch(NamedTuple):
    """Where and how a kernel runs."""

    name: str
    chip: Chip
    interpret: Any
    grid: tuple[int, ...]
    semantics: tuple[Literal["parallel", "arbitrary"], ...]


def launch(
    how: Launch,
    kernel: Callable[[Refs], None],
    tables: Mapping[str, jax.Array],
    inputs: Mapping[str, Input | None],
    outputs: Mapping[str, Output | None],
    scratch: Mapping[str, tuple[Sequence[int], Any]],
) -> dict[str, jax.Array]:
    """The outputs by name.

    Args:
        kernel: gets refs by name: tables, inputs, outputs and scratch.
        tables: integers that index maps and the kernel read as scalars; index maps get them after the grid's indices.
        inputs, outputs: those that are None are not there.
    """
    given = {name: x for name, x in inputs.items() if x is not None}
    made = {name: x for name, x in outputs.items() if x is not None}
    names = (*tables, *given, *made, *scratch)
    axes = varying_axes(*tables.values(), *(x.array for x in given.values()))
    call = pl.pallas_call(
        lambda *refs: kernel(dict(zip(names, refs, strict=True))),
        out_shape=[shape_of(x.shape, x.dtype, axes) for x in made.values()],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(tables),
            grid=how.grid,
            in_specs=[x.spec for x in given.values()],
            out_specs=[x.spec for x in made.values()],
            scratch_shapes=[pltpu.VMEM(tuple(shape), dtype) for shape, dtype in scratch.values()],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=how.semantics, vmem_limit_bytes=how.chip.vmem_limit),
        interpret=how.interpret,
        name=how.name,
    )
    integers = [x.astype(jnp.int32) for x in tables.values()]
    with jax.enable_x64(False):  # the compiler takes no integers of 64 bits, which indices would be where these are enabled
        results = call(*integers, *(x.array for x in given.values()))
    return dict(zip(made, results, strict=True))


def shape_of(shape: Sequence[int], dtype: Any, axes: frozenset[str]) -> jax.ShapeDtypeStruct:
    """A result's shape, which under `shard_map` varies over the mesh axes that the arguments vary over."""
    like = jax.typeof(vary(jnp.zeros((), dtype), axes))  # says so also where they vary over none
    return jax.ShapeDtypeStruct(tuple(shape), dtype, manual_axis_type=like.mat)
