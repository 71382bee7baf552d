"""The routes of calls on TPUs with the kernels that they launch, made from the code: what `docs/routes.md` shows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel._device import on_device
from ejkernel.kernels import _pallas as pallas
from ejkernel.kernels._pallas._chips import CHIPS
from ejkernel.kernels._pallas.gated_delta_rule.routes import ROUTES as DELTA_ROUTES
from ejkernel.kernels._pallas.linear.routes import ROUTES as LINEAR_ROUTES
from ejkernel.testing.tpu_schedules import kernels_of

CHIP = CHIPS["v5e"]
H, K = 2, 128


@dataclasses.dataclass(frozen=True)
class Call:
    """A call by example, in bfloat16.

    Attributes:
        function: the operation's function of the platform.
        said: the call, for readers.
        tokens: T.
        extra: shapes of the arguments beside query, key and value; those of a gate per head are float32.
    """

    function: Any
    said: str
    tokens: int
    extra: tuple[tuple[str, tuple[int, ...]], ...] = ()

    def arrays(self) -> dict[str, jax.ShapeDtypeStruct]:
        of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16 if len(shape) > 3 else jnp.float32)
        rows = {name: of(1, self.tokens, H, K) for name in ("query", "key", "value")}
        return rows | {name: of(*shape) for name, shape in self.extra}

    def route(self) -> str:
        """As `report()` shows it."""
        how = self.function.implementation
        with on_device(CHIP.device):
            problem = jax.eval_shape(self.function.signature.problem, **self.arrays())
            return how.route(problem, how.heuristic(problem))

    def kernels(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The kernels of the forward pass, and of the gradient after it."""
        run = lambda arrays: jax.tree.leaves(self.function(**arrays))
        found = []
        with on_device(CHIP.device):
            for function in (run, lambda arrays: jax.vjp(run, arrays)[1](run(arrays))):
                traced = jax.make_jaxpr(function)(self.arrays())
                found.append(tuple(dict.fromkeys(name for name, _, _ in kernels_of(traced.jaxpr))))
        forward, everything = found
        return forward, tuple(name for name in everything if name not in forward)


def _calls(tokens: int, key_gate: str, *others: tuple[str, tuple[int, ...]]) -> list[tuple[str, Any]]:
    """A call without a gate, with one per head, and one per key channel, each as (said, its extra arguments)."""
    gates = {
        "no gate": (),
        "`g` [B, T, H]": (("g", (1, tokens, H)),),
        f"`{key_gate}` [B, T, H, K]": ((key_gate, (1, tokens, H, K)),),
    }
    return [(said, (*others, *gate)) for said, gate in gates.items()]


def calls() -> dict[str, tuple[Any, list[Call]]]:
    """Calls of every family, each with the family's routes as (title, calls that take it)."""
    linear, delta = pallas.recurrent, pallas.gated_delta_rule
    long, beta = 2048, lambda tokens: ("beta", (1, tokens, H))
    key_value = (("gk", (1, long, H, K)), ("gv", (1, long, H, K)))
    return {
        "Linear attention": (
            [(route.title, route.covers) for route in LINEAR_ROUTES],
            [
                Call(linear, "`gk`, T = 1", 1, (("gk", (1, 1, H, K)),)),
                *(Call(linear, said, long, extra) for said, extra in _calls(long, "gk")),
                Call(linear, "`gk` and `gv`", long, key_value),
            ],
        ),
        "The delta rule": (
            [(route.title, route.covers) for route in DELTA_ROUTES],
            [
                Call(delta, "`g` [B, T, H], T = 1", 1, (beta(1), ("g", (1, 1, H)))),
                *(Call(delta, said, long, extra) for said, extra in _calls(long, "g", beta(long))),
            ],
        ),
        "Softmax attention": (
            [
                ("splash attention", "all that the platform takes: JAX's own kernels"),
                ("splash attention, or xla where positions do not count tokens", "the same with positions, which are data"),
            ],
            [],  # the names of its kernels change with JAX
        ),
    }


def table() -> str:
    """All families as Markdown."""
    return "\n".join(f"### {title} on TPUs\n\n{_family(*found)}" for title, found in calls().items())


def _family(routes: Iterable[tuple[str, str]], examples: list[Call]) -> str:
    lines = ["| route | calls |", "|---|---|", *(f"| {title} | {covers} |" for title, covers in routes), ""]
    lines += ["| call | route | forward | backward |", "|---|---|---|---|"] if examples else []
    for call in examples:
        forward, backward = (", ".join(f"`{name}`" for name in names) for names in call.kernels())
        lines.append(f"| {call.said} | {call.route()} | {forward} | {backward} |")
    return "\n".join(lines).rstrip() + "\n"
