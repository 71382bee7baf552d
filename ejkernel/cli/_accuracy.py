"""The error of a call that is timed, against float64, on the part of it that a reference can afford.

Compared are the last tokens, in the first batch row and the first heads: there everything before has added up. The output's
gradient is zero elsewhere, so that the gradients of that part follow from that part and the state (or the keys) before it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.cli._operations import Operation
from ejkernel.testing.attention_reference import attention_reference
from ejkernel.testing.compare import relative_rms
from ejkernel.testing.linear_reference import linear_reference
from ejkernel.testing.shapes import Shape

TOKENS = 256
_TOTALS = ("g_gamma",)  # whose gradient is a sum over all tokens, which no part of them has


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of a call that is compared: its last `tokens`, one row, the first `heads` (`kv_heads` of key and value)."""

    tokens: int
    heads: int
    kv_heads: int

    @classmethod
    def of(cls, shape: Shape) -> Part:
        kv_heads = shape.heads if shape.kv_heads is None else shape.kv_heads
        groups = shape.heads // kv_heads
        kept = min(kv_heads, 2 if groups == 1 else 1)
        return cls(min(TOKENS, shape.time), kept * groups, kept)

    def cut(self, name: str, array: np.ndarray, all_tokens: bool = False) -> np.ndarray:
        """This part of an array `[B, T, heads, ...]`."""
        heads = self.kv_heads if name in ("key", "value") else self.heads
        if name in _TOTALS:
            return array[:heads]
        first = 0 if all_tokens else array.shape[1] - self.tokens
        return array[:1, first:, :heads]


class Judge:
    """The float64 results of one call, computed once for all who are measured on it."""

    def __init__(self, op: Operation, shape: Shape, arrays: dict[str, jax.Array], cotangent: jax.Array, gradients: bool):
        self.op, self.shape, self.part = op, shape, Part.of(shape)
        first = shape.time - self.part.tokens
        keep = jnp.zeros(cotangent.shape, bool).at[:1, first:, : self.part.heads].set(True)
        self.cotangent = jnp.where(keep, cotangent, 0).astype(cotangent.dtype)
        wide = {name: _wide(x) for name, x in arrays.items()}
        adjoint = self.part.cut("output", _wide(self.cotangent))
        solve = self._linear if op.linear else self._softmax
        self.output, self.gradients = solve(wide, adjoint, gradients)

    def errors(self, output: np.ndarray, gradients: dict[str, np.ndarray]) -> tuple[float, float | None]:
        """Relative RMS error of the output, and the worst of the gradients; None where there are none."""
        mine = {name: self.part.cut(name, x, not self.op.linear and name != "query") for name, x in gradients.items()}
        worst = max((relative_rms(mine[name], want) for name, want in self.gradients.items() if name in mine), default=None)
        return relative_rms(self.part.cut("output", output), self.output), worst

    def _linear(self, wide: dict[str, np.ndarray], adjoint: np.ndarray, gradients: bool) -> tuple[np.ndarray, dict]:
        decay = self.op.decay(self.shape.heads)
        if decay is not None:
            wide = wide | {"g_gamma": np.asarray(decay, np.float64)}
        every = {name: self.part.cut(name, x, all_tokens=True) for name, x in wide.items()}
        last = self.shape.time - self.part.tokens
        before = {name: x if name in _TOTALS else x[:, :last] for name, x in every.items()}
        now = {name: x if name in _TOTALS else x[:, last:] for name, x in every.items()}
        with jax.enable_x64(True):
            state = jax.jit(linear_reference)(**before)[1]
            run = lambda arrays: linear_reference(**arrays, initial_state=state)[0]
            if not gradients:
                return np.asarray(jax.jit(run)(now)), {}
            output, found = jax.jit(functools.partial(_with_gradients, run))(now, adjoint)
        return np.asarray(output), {name: np.asarray(x) for name, x in found.items() if name not in _TOTALS}

    def _softmax(self, wide: dict[str, np.ndarray], adjoint: np.ndarray, gradients: bool) -> tuple[np.ndarray, dict]:
        total = self.shape.time
        found = attention_reference(
            self.part.cut("query", wide["query"]),
            self.part.cut("key", wide["key"], all_tokens=True),
            self.part.cut("value", wide["value"], all_tokens=True),
            adjoint,
            causal=True,
            q_positions=np.arange(total - self.part.tokens, total)[None],
            kv_positions=np.arange(total)[None],
        )
        return found.output, {name: found.gradients[name] for name in ("query", "key", "value")} if gradients else {}


def _with_gradients(
    run: Callable[[dict[str, Any]], Any], arrays: dict[str, Any], adjoint: Any
) -> tuple[jax.Array, dict[str, jax.Array]]:
    output, pull = jax.vjp(run, arrays)
    return output, pull(adjoint)[0]


def _wide(array: jax.Array) -> np.ndarray:
    return np.asarray(array).astype(np.float64)
