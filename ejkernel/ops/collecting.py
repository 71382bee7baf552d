"""Listing the calls that a function makes, without running it.

The list is a JAX context, so functions that were jitted before are traced again while it is being made, and no call hides in
a cached trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import jax

from ejkernel.ops.invocation import Invocation

if TYPE_CHECKING:
    from ejkernel.ops.config.selection import ConfigSelectorChain

# At import, because JAX does not allow new contexts while other threads use it.
_active = jax.make_user_context(default_value=None)


class Calls:
    """The distinct calls found so far, with the chain that would choose for each."""

    def __init__(self) -> None:
        self.found: dict[tuple[int, str], tuple[ConfigSelectorChain, Invocation[Any, Any]]] = {}

    def add(self, chooser: ConfigSelectorChain, inv: Invocation[Any, Any]) -> None:
        self.found.setdefault((id(chooser), inv.key), (chooser, inv))


@contextmanager
def collecting() -> Iterator[Calls]:
    """Inside the block, executors list their calls and run with heuristics."""
    calls = Calls()
    with _active(calls):
        yield calls


def current() -> Calls | None:
    """The list being made, if any."""
    calls: Calls | None = _active.value
    return calls
