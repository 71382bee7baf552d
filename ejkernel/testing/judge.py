"""The error of a call that is timed, against float64, on as much of it as a reference can afford.

Long calls are compared in part: the last tokens of the first row and the first heads, where everything before has added up. The
output's gradient is zero elsewhere, so that the gradients of that part follow from it and from the state (or the keys) before.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.testing.compare import reference_settings, relative_rms
from ejkernel.testing.shapes import Shape

TOKENS = 256
Arrays = Mapping[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Judge:
    """What a call must give, computed once for all who are measured on it.

    Attributes:
        cotangent: the gradient of the output that gradients are taken for.
        output: the part of the output that is compared, in float64.
        gradients: the parts of the gradients, by name; those that are not here are not compared.
        part: the part of a result that is compared, from its name and the whole array.
    """

    cotangent: jax.Array
    output: np.ndarray
    gradients: Mapping[str, np.ndarray]
    part: Callable[[str, np.ndarray], np.ndarray] = lambda name, array: array

    def errors(self, output: np.ndarray, gradients: Mapping[str, np.ndarray]) -> tuple[float, float | None]:
        """Relative RMS error of the output, and the worst of the gradients; None where there are none."""
        compared = {name: want for name, want in self.gradients.items() if name in gradients}
        errors = [relative_rms(self.part(name, gradients[name]), want) for name, want in compared.items()]
        return relative_rms(self.part("output", output), self.output), max(errors, default=None)


@dataclasses.dataclass(frozen=True)
class Part:
    """The part of a call that is compared: one row, its last `tokens`, the first `heads`.

    Attributes:
        grouped_heads: how many of `grouped` belong to those heads.
        grouped: arrays that have fewer heads than the output.
        constant: arrays `[heads]` that do not vary with the tokens. Their gradient is a sum over all tokens, which no part has.
    """

    tokens: int
    heads: int
    grouped_heads: int
    grouped: tuple[str, ...] = ("key", "value")
    constant: tuple[str, ...] = ()

    @classmethod
    def of(cls, shape: Shape, grouped: tuple[str, ...] = ("key", "value"), constant: tuple[str, ...] = ()) -> Part:
        """Two heads, or one group of them."""
        fewer = shape.heads if shape.kv_heads is None else shape.kv_heads
        in_a_group = shape.heads // fewer
        kept = min(fewer, 2 if in_a_group == 1 else 1)
        return cls(min(TOKENS, shape.time), kept * in_a_group, kept, grouped, constant)

    def heads_of(self, name: str, array: np.ndarray) -> np.ndarray:
        """One row and the first heads of an array `[B, T, heads, ...]`, with all tokens."""
        heads = self.grouped_heads if name in self.grouped else self.heads
        return array[:heads] if name in self.constant else array[:1, :, :heads]

    def cut(self, name: str, array: np.ndarray) -> np.ndarray:
        """This part of an array."""
        mine = self.heads_of(name, array)
        return mine if name in self.constant else mine[:, mine.shape[1] - self.tokens :]

    def before(self, name: str, array: np.ndarray) -> np.ndarray:
        """The same row and heads of an array, up to this part."""
        mine = self.heads_of(name, array)
        return mine if name in self.constant else mine[:, : mine.shape[1] - self.tokens]

    def only(self, cotangent: jax.Array) -> jax.Array:
        """A gradient of the output that is zero outside of this part."""
        first = cotangent.shape[1] - self.tokens
        here = jnp.zeros(cotangent.shape, bool).at[:1, first:, : self.heads].set(True)
        return jnp.where(here, cotangent, 0).astype(cotangent.dtype)


def of_whole(reference: Callable[..., jax.Array], arrays: Arrays, cotangent: jax.Array, gradients: bool) -> Judge:
    """The judge of a whole call: `reference(**arrays)` gives the output, differentiably, where 64-bit numbers are enabled."""
    wide = {name: float64(x) for name, x in arrays.items()}
    with reference_settings():
        output, found = _run(lambda arrays: reference(**arrays), wide, float64(cotangent), gradients)
    return Judge(cotangent, output, found)


def of_recurrence(
    reference: Callable[..., tuple[jax.Array, jax.Array]], arrays: Arrays, cotangent: jax.Array, gradients: bool, part: Part
) -> Judge:
    """The judge of a part of a recurrence: the state before the part is all that it needs of what is before.

    Args:
        reference: gives `(output, state)` of arrays by name and an `initial_state`, as `of_whole`'s gives the output.
    """
    wide = {name: float64(x) for name, x in arrays.items()}
    before = {name: part.before(name, x) for name, x in wide.items()}
    now = {name: part.cut(name, x) for name, x in wide.items()}
    shown = part.only(cotangent)
    with reference_settings():
        state = jax.jit(lambda arrays: reference(**arrays)[1])(before)
        run = lambda arrays: reference(**arrays, initial_state=state)[0]
        output, found = _run(run, now, part.cut("output", float64(shown)), gradients)
    return Judge(shown, output, {name: x for name, x in found.items() if name not in part.constant}, part.cut)


def float64(array: jax.Array) -> np.ndarray:
    """An array's values in float64."""
    return np.asarray(array).astype(np.float64)


def _run(
    function: Callable[[dict[str, Any]], jax.Array], arrays: dict[str, np.ndarray], cotangent: np.ndarray, gradients: bool
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    if not gradients:
        return np.asarray(jax.jit(function)(arrays)), {}
    output, found = jax.jit(functools.partial(_with_gradients, function))(arrays, cotangent)
    return np.asarray(output), {name: np.asarray(x) for name, x in found.items()}


def _with_gradients(
    function: Callable[[dict[str, Any]], jax.Array], arrays: dict[str, Any], cotangent: Any
) -> tuple[jax.Array, dict[str, jax.Array]]:
    output, pull = jax.vjp(function, arrays)
    return output, pull(cotangent)[0]
