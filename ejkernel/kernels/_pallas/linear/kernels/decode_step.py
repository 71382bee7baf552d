"""A few tokens, one after another: each state is read once and written once.

    S = D_t(S) + k_t u_t^T;   o_t = scale * q_t S         u_t: what the token writes, v_t in linear attention

All of it is elementwise in float32, one block of heads at a time. What multiplies rows of the state (q, k, gates per key
channel) is wanted as columns: these rows of all heads of a block come together and are transposed at once, since an array with
a token or two along the lanes would be as large as the states.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.kernels._pallas._launch import Input, Launch, Output, Refs, launch
from ejkernel.kernels._pallas._products import column_sums
from ejkernel.kernels._pallas.linear._plan import Plan

Array = jax.Array
ROWS = ("query", "key", "gk")  # what multiplies rows of the state
SUBLANES = 8  # rows of a tile of float32


class Token(NamedTuple):
    """One token of a head."""

    column: dict[str, Array]  # [K, 1]: those of `ROWS`
    row: dict[str, Array]  # [1, V | 1]: all else


Write = Callable[[Array, Token], Array]  # what a token writes [1, V], from the decayed state [K, V]


def forward(name: str, plan: Plan, arrays: dict[str, Array], initial: Array, write: Write) -> tuple[Array, Array]:
    """(output [B, T, H, V], final state [B, H, K, V]); arrays: those of a problem's `differentiable`."""
    _, H, K, V = initial.shape
    B, T = arrays["query"].shape[:2]
    heads = max(n for n in range(1, min(plan.heads, H) + 1) if H % n == 0)
    blocks = H // heads
    given = _by_heads(arrays, T, H)
    per_head = lambda *shape: pl.BlockSpec((1, heads, *shape), lambda b, n: (b, n, 0, 0))
    inputs: dict[str, Input | None] = {"initial": Input(initial, per_head(K, V))}
    inputs |= {name: Input(x, per_head(*x.shape[2:])) for name, x in given.items() if name not in ROWS}
    names = tuple(name for name in ROWS if name in given)
    rows = jnp.stack([given[name] for name in names], 2)  # [B, H, names, T, K]
    rows = rows.reshape(B, blocks, heads * len(names) * T, K)
    rows = jnp.pad(rows, [(0, 0), (0, 0), (0, -rows.shape[2] % SUBLANES), (0, 0)])
    inputs["rows"] = Input(rows, pl.BlockSpec((1, 1, *rows.shape[2:]), lambda b, n: (b, n, 0, 0)))
    others = tuple(name for name in given if name not in ROWS)
    made = launch(
        Launch(name, plan.chip, plan.interpret, (B, blocks), ("parallel", "parallel")),
        lambda refs: _steps(plan, (heads, T), (names, others), write, refs),
        {},
        inputs,
        {
            "output": Output((B, H, T, V), plan.output, per_head(T, V)),
            "final": Output(initial.shape, jnp.float32, per_head(K, V)),
        },
        {},
    )
    return jnp.swapaxes(made["output"], 1, 2), made["final"]


def _by_heads(arrays: dict[str, Array], T: int, H: int) -> dict[str, Array]:
    """`[B, H, T, D]` in float32, grouped heads repeated (a few tokens cost nothing).

    What is a number per token and head has one channel; `g` holds all gates of whole states.
    """
    found: dict[str, Array] = {}
    for name, given in arrays.items():
        if name == "initial_state":
            continue
        x = given.astype(jnp.float32)
        if name == "g_gamma":  # [B, H]
            x, name = jnp.broadcast_to(x[:, None], (x.shape[0], T, H)), "g"
        x = x[..., None] if x.ndim == 3 else x
        x = x if x.shape[2] == H else jnp.repeat(x, H // x.shape[2], axis=2)
        x = jnp.swapaxes(x, 1, 2)
        found[name] = found[name] + x if name in found else x
    return found


def _steps(
    plan: Plan, sizes: tuple[int, int], named: tuple[tuple[str, ...], tuple[str, ...]], write: Write, refs: Refs
) -> None:
    (heads, T), (names, others) = sizes, named
    columns = refs["rows"][0, 0].T  # [K, heads * names * T]
    for h in range(heads):
        S = refs["initial"][0, h]  # [K, V]
        for step in range(T):
            t = T - 1 - step if plan.reverse else step
            place = {name: (h * len(names) + i) * T + t for i, name in enumerate(names)}
            column = {name: columns[:, at : at + 1] for name, at in place.items()}
            token = Token(column, {name: refs[name][0, h, t : t + 1, :] for name in others})
            for gate in (token.row.get("g"), token.column.get("gk"), token.row.get("gv")):
                S = S if gate is None else S * jnp.exp(gate)
            S = S + token.column["key"] * write(S, token)
            output = column_sums(token.column["query"] * S) * plan.scale  # [1, V]
            refs["output"][0, h, t : t + 1, :] = output.astype(plan.output)
        refs["final"][0, h] = S
