"""How a call splits over a mesh: every device computes its rows of the batch and its heads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from ejkernel._meshes import run_partitioned
from ejkernel.kernels._linear import axes
from ejkernel.parallel.partition import Axes, Roles, partitioned

Array = jax.Array
STARTS = ("batch", "", "heads", "key channels", "value channels")  # the state before each chunk


def roles(name: str, packed: bool) -> Roles:
    """What the axes of an argument or result of that name are."""
    return STARTS if name == "starts" else axes.roles(name, packed)


def split(function: Callable[..., dict[str, Any]], results: tuple[str, ...], **args: Any) -> dict[str, Any]:
    """`function(**args)`, part by part where the program runs on several devices.

    Args:
        results: the names of the leaves of what it gives, in order.
        args: arrays, None, or dicts of arrays, whose names tell what their axes are.
    """
    packed = args["cu_seqlens"] is not None
    name = lambda path: path[-1].key
    names = tuple(name(path) for path, _ in jax.tree_util.tree_flatten_with_path(args)[0])
    of = functools.partial(roles, packed=packed)
    split_axes = Axes(names, tuple(map(of, names)), tuple(map(of, results)))
    return partitioned(lambda args: function(**args), args, lambda: split_axes)


def over_explicit_axes(
    function: Callable[[dict[str, Array], Array | None], tuple[Array, Array]],
    arrays: dict[str, Array],
    cu_seqlens: Array | None,
) -> tuple[Array, Array]:
    """(output, final state) of arrays whose types may say how they are split: then each device runs the call on its part."""
    given = arrays if cu_seqlens is None else {**arrays, "cu_seqlens": cu_seqlens}
    of = functools.partial(roles, packed=cu_seqlens is not None)

    def run(given: dict[str, Array]) -> tuple[Array, Array]:
        return function({name: given[name] for name in arrays}, given.get("cu_seqlens"))

    wanted = of("output"), of("final")
    return run_partitioned(run, given, {name: of(name) for name in given}, wanted, axes.FREE, axes.ADVICE, by_hand=True)
