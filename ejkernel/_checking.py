"""Checks of values: mistakes that shapes and dtypes do not show.

They are off by default and then cost nothing. `EJKERNEL_CHECK=1` or `check_values()` turns them on; under `jit` the program
itself looks, by a callback that raises.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

VARIABLE = "EJKERNEL_CHECK"

# At import, because JAX does not allow new contexts while other threads use it.
_asked = jax.make_user_context(default_value=None)


@contextmanager
def check_values(on: bool = True) -> Iterator[None]:
    """Inside the block, operations check the values of their arguments: gates, offsets, the delta rule's beta.

    Functions that were jitted before are traced again inside the block, and run as before after it. A wrong value raises a
    ValueError that names argument, index and value; under `jit` it arrives as JAX's runtime error with the same text. For a
    whole program set `EJKERNEL_CHECK=1` before it starts.

    Args:
        on: False turns the checks off inside the block.

    Example:
        >>> import ejkernel
        >>> q = k = v = g = jnp.ones((1, 4, 1, 2))  # a decay of exp(1) amplifies
        >>> with check_values():
        ...     ejkernel.gla_attention(q, k, v, g)
        Traceback (most recent call last):
        ...
        ValueError: g is 1 at [0, 0, 0, 0], the largest of [1, 4, 1, 2]. Log decays are at most 0...
    """
    with _asked(bool(on)):
        yield


def checking() -> bool:
    """Whether values are checked at this point."""
    asked: bool | None = _asked.value
    if asked is not None:
        return asked
    text = os.environ.get(VARIABLE)
    if text not in (None, "", "0", "1"):
        raise ValueError(f"{VARIABLE} must be 0 or 1; got {text!r}.")
    return text == "1"


@dataclass(frozen=True)
class ValueCheck:
    """One look at the values of an argument.

    Attributes:
        argument: its name.
        measured: what the judgement needs of it, computed where the argument lies: arrays, small ones.
        judged: the mistake that measured values show, in words; None where there is none.
        doubtful: whether it is worth a warning where checks are off and the values are at hand.
    """

    argument: str
    measured: Callable[[], tuple[Any, ...]]
    judged: Callable[..., str | None]
    doubtful: bool = False

    def mistake(self) -> str | None:
        """The mistake, for an argument whose values are known."""
        with _unwatched():
            return self.judged(*map(np.asarray, self.measured()))

    def make(self) -> None:
        """Raises ValueError where there is a mistake: at once where values are known, else when the program runs."""
        with _unwatched():
            measured = self.measured()
        if any(isinstance(x, jax.core.Tracer) for x in measured):
            jax.debug.callback(self._raise, *measured)
        else:
            self._raise(*measured)

    def _raise(self, *measured: Any) -> None:
        with _unwatched():
            message = self.judged(*map(np.asarray, measured))
        if message is not None:
            raise ValueError(message)


@contextmanager
def _unwatched() -> Iterator[None]:
    """Inside, JAX watches neither transfers nor what is not finite: such settings are for a program, not for a look at it."""
    with jax.transfer_guard("allow"), jax.debug_nans(False), jax.debug_infs(False):
        yield


def extreme(array: Any, distance: Callable[[Any], Any]) -> tuple[Any, ...]:
    """The value of an array that is farthest by `distance` and its index, one number for each axis. A NaN is farthest of all.

    By reductions alone, which every way of splitting an array between devices allows; indexing and reshaping may be refused.
    """
    far = distance(array)
    unknown = jnp.isnan(far)
    # Not left to max: of 8192 numbers and more, XLA's on a CPU may pass a NaN over, and find the others wrong beside it.
    worst = jnp.max(jnp.where(unknown, -jnp.inf, far))
    here = jnp.where(jnp.any(unknown), unknown, far == worst)
    places = []
    for axis, size in enumerate(array.shape):
        number = lax.broadcasted_iota(jnp.int32, array.shape, axis)
        places.append(jnp.min(jnp.where(here, number, size)))
        here = here & (number == places[-1])
    return jnp.sum(jnp.where(here, array, 0), dtype=jnp.float32), *places
