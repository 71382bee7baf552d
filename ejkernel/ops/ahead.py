"""`tune`: measuring ahead of the run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import jax

from ejkernel.ops.collecting import collecting
from ejkernel.ops.invocation import split
from ejkernel.ops.notices import ConfigWarning
from ejkernel.ops.reporting import Chosen, Report, describe


def tune(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Report:
    """Tunes every operation that `fn(*args, **kwargs)` would call, also inside `jit`, `scan`, `grad` and `vmap`.

    `fn` is traced once, on shapes alone; nothing of it is computed. Then each distinct call without a stored result is
    measured, whatever the policy says, and stored. Calls with an explicit `cfg` are left alone.

    Args:
        *args, **kwargs: as for `fn`; arrays may be `jax.ShapeDtypeStruct`s.

    Returns:
        What was chosen for each call, by which level, with times and losers. Print it for a table.

    """
    arrays, layout = split(args, kwargs)

    def on_arrays(*concrete: Any) -> Any:
        there, named = layout.rebuild(concrete)
        return fn(*there, **named)

    with collecting() as calls:
        jax.eval_shape(on_arrays, *arrays)
    if not calls.found:
        warnings.warn(f"{getattr(fn, '__name__', fn)} calls no operation; nothing was tuned.", ConfigWarning, stacklevel=2)
    chosen: list[Chosen] = []
    for chooser, inv in calls.found.values():
        choice = chooser.tune(inv)
        chosen.append(describe(inv, str(choice.level), choice.config, choice.record))
    return Report(chosen)
