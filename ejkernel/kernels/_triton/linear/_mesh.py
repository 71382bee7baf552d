"""How the recurrences on Triton split over a mesh: every device computes its rows of the batch and its heads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from ejkernel._meshes import run_partitioned
from ejkernel.kernels._linear.axes import ADVICE, FREE, Roles, roles
from ejkernel.kernels._triton.linear._call import Call
from ejkernel.kernels._triton.linear._chunks import Array
from ejkernel.kernels._triton.linear._windows import forward_pass
from ejkernel.kernels._triton.linear.routes import Route
from ejkernel.parallel.partition import Axes, partitioned, roles_of_results

Launch = Callable[..., dict[str, Any]]


def split_forward(route: Route, keep: bool) -> Launch:
    """The forward pass of a route over arrays [B, T, ...]; gives `output`, `final` and `saved`."""

    def launch(args: dict[str, Any]) -> dict[str, Any]:
        found = forward_pass(route, Call.of(route.plan, args["arrays"], args["cu_seqlens"]), keep)
        return dict(zip(("output", "final", "saved"), found, strict=True))

    def run(**args: Any) -> dict[str, Any]:
        shapes = _shapes(args)
        return partitioned(launch, args, lambda: _axes(shapes, _forward_roles(launch, shapes)))

    return run


def split_backward(route: Route, gradients: Callable[..., dict[str, Array]]) -> Launch:
    """The backward pass of a route; gives the gradient of every array."""

    def forward(args: dict[str, Any]) -> Any:
        return route.forward(Call.of(route.plan, args["arrays"], args["cu_seqlens"]), True)[2]

    def run(**args: Any) -> dict[str, Any]:
        shapes, packed = _shapes(args), args["cu_seqlens"] is not None
        results = {name: roles(name, packed) for name in args["arrays"]}
        before = {name: shapes[name] for name in ("arrays", "cu_seqlens")}
        saved = lambda: roles_of_results(forward, before, _named(before, packed)[1])
        return partitioned(lambda args: gradients(**args), args, lambda: _axes(shapes, results, saved))

    return run


def over_explicit_axes(
    function: Callable[[dict[str, Array], Array | None], tuple[Array, Array]],
    arrays: dict[str, Array],
    cu_seqlens: Array | None,
) -> tuple[Array, Array]:
    """(output, final state) of arrays whose types may say how they are split: then each device runs the call on its part."""
    packed = cu_seqlens is not None
    given = arrays if cu_seqlens is None else {**arrays, "cu_seqlens": cu_seqlens}

    def run(given: dict[str, Array]) -> tuple[Array, Array]:
        return function({name: given[name] for name in arrays}, given.get("cu_seqlens"))

    of = functools.partial(roles, packed=packed)
    wanted = of("output"), of("final")
    return run_partitioned(run, given, {name: of(name) for name in given}, wanted, FREE, ADVICE, by_hand=True)


def _shapes(args: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), args)


def _named(args: Any, packed: bool) -> tuple[tuple[str, ...], tuple[Roles, ...]]:
    """Names and roles of the leaves of `args`, none of which is of what a forward pass kept."""
    names = tuple(path[-1].key for path, _ in jax.tree_util.tree_flatten_with_path(args)[0])
    return names, tuple(roles(name, packed) for name in names)


def _forward_roles(launch: Callable[[Any], Any], args: dict[str, Any]) -> Any:
    return roles_of_results(launch, args, _named(args, args["cu_seqlens"] is not None)[1])


def _axes(args: dict[str, Any], results: Any, saved: Callable[[], Any] = dict) -> Axes:
    """args in the order of their leaves: the names of a dict, sorted."""
    packed = args["cu_seqlens"] is not None
    leaves = lambda tree: jax.tree.leaves(tree, is_leaf=lambda x: isinstance(x, tuple) and all(isinstance(y, str) for y in x))
    names: list[str] = []
    found: list[Roles] = []
    for part in sorted(args):
        if part == "saved":
            own = leaves(saved())
            names += ["what the forward pass kept"] * len(own)
            found += own
        else:
            own_names, own_roles = _named({part: args[part]}, packed)
            names += own_names
            found += own_roles
    return Axes(tuple(names), tuple(found), tuple(leaves(results)))
