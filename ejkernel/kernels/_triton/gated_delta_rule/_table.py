"""The table of the delta rule's routes, made from the code."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ejkernel._device import Device, on_device
from ejkernel.kernels._delta import DeltaProblem, GatedDeltaRuleConfig
from ejkernel.kernels._triton.gated_delta_rule._plan import delta_plan
from ejkernel.kernels._triton.gated_delta_rule.routes import ROUTES, route_of
from ejkernel.kernels._triton.linear._launches import DEVICES, routes_table
from ejkernel.kernels._triton.linear.routes.route import Route

CALLS = (  # gate, tokens, dtype
    ("g [B, T, H, K]", 1, "bfloat16"),
    ("no gate", 2048, "bfloat16"),
    ("g [B, T, H]", 2048, "bfloat16"),
    ("g [B, T, H]", 2048, "float32"),
    ("g [B, T, H, K]", 2048, "bfloat16"),
    ("g [B, T, H, K]", 2048, "float32"),
)


def table() -> str:
    """The routes and their kernels as Markdown: what `docs/routes.md` shows."""
    return routes_table(ROUTES, [_call(*call) for call in CALLS])


def _call(gate: str, T: int, dtype: str) -> tuple[str, Route, DeltaProblem]:
    shapes: dict[str, tuple[int, ...]] = {"query": (1, T, 2, 128), "key": (1, T, 2, 128), "value": (1, T, 2, 128)}
    shapes["beta"] = (1, T, 2)
    if gate != "no gate":
        shapes["g"] = (1, T, 2, 128) if "K" in gate else (1, T, 2)
    with on_device(Device("gpu", DEVICES[90], 90)):
        arrays: Any = {name: jax.ShapeDtypeStruct(x, jnp.dtype(dtype)) for name, x in shapes.items()}
        problem = DeltaProblem(**arrays)
    cfg = GatedDeltaRuleConfig("recurrent" if T == 1 else "chunked", 64 if dtype == "bfloat16" else 32)
    said = f"{gate}, {dtype}" + (f", T = {T}" if T == 1 else "")
    return said, route_of(delta_plan(problem, cfg)), problem
