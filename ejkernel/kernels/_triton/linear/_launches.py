"""What a route launches, seen without launching it, and the table of all routes made from that."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from triton.errors import TritonError

from ejkernel._device import Device, on_device
from ejkernel.callib import Launch, instead_of_launching
from ejkernel.kernels._linear import LinearConfig, LinearProblem
from ejkernel.kernels._triton.linear._call import Call
from ejkernel.kernels._triton.linear._plan import Plan, Problem
from ejkernel.kernels._triton.linear._solve import gradients_along
from ejkernel.kernels._triton.linear.routes import ROUTES, Route, route_of

DEVICES = {80: "NVIDIA A100", 90: "NVIDIA H200"}


@dataclasses.dataclass(frozen=True)
class Launches:
    """The launches of one call, in order."""

    forward: tuple[Launch, ...]
    backward: tuple[Launch, ...]


def arrays_of(problem: Problem) -> dict[str, Any]:
    """The differentiable arrays of a problem, as shapes."""
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in problem.differentiable.items()}


def launches(route: Route, arrays: dict[str, Any], cu_seqlens: Any = None) -> Launches:
    """What a call with these arrays (or shapes) launches along a route, with everything kept and every gradient asked for."""
    route = route.differentiated(constant_decay="g_gamma" in arrays)
    seen: list[Launch] = []
    before = 0

    def run(arrays: dict[str, Any], cu_seqlens: Any) -> Any:
        nonlocal before
        output, final, saved = route.forward(Call.of(route.plan, arrays, cu_seqlens), True)
        before = len(seen)
        return gradients_along(route, arrays, cu_seqlens, saved, output, final)

    with instead_of_launching(seen.append):
        jax.eval_shape(run, arrays, cu_seqlens)
    return Launches(tuple(seen[:before]), tuple(seen[before:]))


def does_not_fit(route: Route, problem: Problem, capability: int) -> str | None:
    """The reason why a kernel of the call, or of its gradient, does not compile for a GPU; None when all do.

    It compiles them, which a call would do as well: what is compiled here is not compiled again.
    """
    if 0 in problem.query.shape:
        return None
    cu_seqlens = problem.cu_seqlens
    shapes = None if cu_seqlens is None else (cu_seqlens.shape, cu_seqlens.dtype)
    arrays = tuple((name, x.shape, x.dtype) for name, x in arrays_of(problem).items())
    return _first_failure(route, arrays, shapes, capability)


@functools.cache
def _first_failure(route: Route, arrays: tuple[Any, ...], cu_seqlens: Any, capability: int) -> str | None:
    given = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape, dtype in arrays}
    found = launches(route, given, None if cu_seqlens is None else jax.ShapeDtypeStruct(*cu_seqlens))
    for launch in (*found.forward, *found.backward):
        try:
            launch.compile(capability)
        except (RuntimeError, TritonError) as error:
            return str(error).strip().rstrip(".")
    return None


CHUNKED, STEP = LinearConfig(schedule="chunked"), LinearConfig(schedule="recurrent")


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the table: a call by example."""

    gates: tuple[str, ...]
    K: int
    V: int
    dtype: str = "bfloat16"
    tokens: int = 2048
    cfg: LinearConfig = CHUNKED
    capability: int = 90

    @property
    def call(self) -> str:
        """For readers."""
        said = [" and ".join(f"`{gate}`" for gate in self.gates) or "no gate", f"K = {self.K}, V = {self.V}", self.dtype]
        said += [f"T = {self.tokens}"] if self.tokens == 1 else []
        said += [f"block_q = {self.cfg.block_q}"] if self.cfg.block_q != 64 else []
        return ", ".join(said) + ("" if self.capability == 90 else f", {DEVICES[self.capability]}")

    def problem(self) -> LinearProblem:
        T, K, V = self.tokens, self.K, self.V
        dims: dict[str, tuple[int, ...]] = {"query": (1, T, 2, K), "key": (1, T, 2, K), "value": (1, T, 2, V)}
        gates: dict[str, tuple[int, ...]] = {"g": (1, T, 2), "g_gamma": (1, 2), "gk": (1, T, 2, K), "gv": (1, T, 2, V)}
        dims |= {name: gates[name] for name in self.gates}
        with on_device(Device("gpu", DEVICES[self.capability], self.capability)):
            arrays: Any = {name: jax.ShapeDtypeStruct(x, jnp.dtype(self.dtype)) for name, x in dims.items()}
            return LinearProblem(**arrays)


ROWS = (
    Row(("gk",), 128, 128, tokens=1, cfg=STEP),
    Row((), 128, 128),
    Row(("g",), 128, 128),
    Row(("g",), 128, 128, capability=80),
    Row(("g_gamma",), 64, 64),
    Row(("g",), 128, 128, "float32"),
    Row(("g",), 256, 512),
    Row(("g",), 256, 512, capability=80),
    Row(("g",), 512, 512),
    Row(("gk",), 128, 128),
    Row(("gk",), 256, 512),
    Row(("gk",), 256, 512, capability=80),
    Row(("gk", "gv"), 128, 128),
    Row(("gk", "gv"), 128, 128, capability=80),
    Row(("gv",), 128, 128),
    Row(("gk",), 128, 128, "float32"),
    Row(("gk",), 128, 128, cfg=LinearConfig(block_q=32)),
)


def table() -> str:
    """The routes and their kernels as Markdown: what `docs/routes.md` shows."""
    return routes_table(ROUTES, [(row.call, route_of(Plan.of(p, row.cfg)), p) for row in ROWS for p in [row.problem()]])


def routes_table(routes: Iterable[type[Route]], calls: Iterable[tuple[str, Route, Problem]]) -> str:
    """Both tables of a family; calls: for readers, with their routes."""
    lines = ["| route | calls |", "|---|---|", *(f"| {route.title} | {route.covers} |" for route in routes), ""]
    lines += ["| call | route | forward | backward |", "|---|---|---|---|"]
    for call, route, problem in calls:
        found = launches(route, arrays_of(problem))
        lines.append(f"| {call} | {route.name} | {_kernels(found.forward)} | {_kernels(found.backward)} |")
    return "\n".join(lines) + "\n"


def _kernels(found: Iterable[Launch]) -> str:
    return ", ".join(dict.fromkeys(f"`{launch.name}`" for launch in found))
