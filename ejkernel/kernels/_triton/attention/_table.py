"""The table of the routes of softmax attention, made from the code."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel._device import Device, on_device
from ejkernel.callib import Launch, instead_of_launching
from ejkernel.kernels._attention import AttentionProblem
from ejkernel.kernels._triton.attention._launches import backward, forward
from ejkernel.kernels._triton.attention._plan import DECODED_QUERIES, LEAST_PART, Plan
from ejkernel.kernels._triton.attention._platform import HEURISTIC, route_name

ROUTES = (
    ("flash", f"more than {DECODED_QUERIES} queries"),
    ("flash decoding", f"up to {DECODED_QUERIES} queries: the heads of a group read their keys once"),
    ("flash decoding, keys in N parts", f"the same where that leaves the device idle; a part has at least {LEAST_PART} keys"),
)
CALLS = (  # said, queries, batch, with a bias
    ("causal", 2048, 1, False),
    ("bias [1, H, T, S]", 2048, 1, True),
    ("one query", 1, 512, False),
    ("one query", 1, 1, False),
)


def table() -> str:
    """The routes and their kernels as Markdown: what `docs/routes.md` shows."""
    lines = ["| route | calls |", "|---|---|", *(f"| {name} | {covers} |" for name, covers in ROUTES), ""]
    lines += ["| call | route | forward | backward |", "|---|---|---|---|"]
    return "\n".join([*lines, *(_line(*call) for call in CALLS)]) + "\n"


def _line(said: str, T: int, B: int, biased: bool) -> str:
    S, H, D = 2048, 4, 128
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    arrays: dict[str, Any] = {"query": of(B, T, H, D), "key": of(B, S, H, D), "value": of(B, S, H, D)}
    arrays |= {"bias": of(1, H, T, S)} if biased else {}
    with on_device(Device("gpu", "NVIDIA H200", 90)):
        problem = AttentionProblem(**arrays, right=0 if T > 1 else None)
    plan = Plan.of(problem, HEURISTIC)
    seen: list[Launch] = []
    with instead_of_launching(seen.append):
        output, lse = jax.eval_shape(functools.partial(forward, plan), arrays, {})
        before = len(seen)
        jax.eval_shape(functools.partial(backward, plan), arrays, {}, output, lse, output)
    kernels = lambda found: ", ".join(dict.fromkeys(f"`{launch.name}`" for launch in found))
    call = f"{said}, B = {B}, T = {T}, S = {S}"
    return f"| {call} | {route_name(plan)} | {kernels(seen[:before])} | {kernels(seen[before:])} |"
