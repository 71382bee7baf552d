"""`overlay`: configurations that apply inside a `with` block.

The block is a JAX context: functions that were jitted before are traced again inside it, and after it use their old program
again. It belongs to the thread that entered it.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax

from ejkernel.ops import names
from ejkernel.ops.config.codec import check_config
from ejkernel.ops.notices import ConfigWarning

# At import, because JAX does not allow new contexts while other threads use it.
_active = jax.make_user_context(default_value=())


@contextmanager
def overlay(configs: Mapping[str, Any] | None = None, /, **by_op_id: Any) -> Iterator[None]:
    """Runs operations with the given configurations inside the block.

    Args:
        configs: configuration by `op_id` (or an alias of it), or by `Invocation.key` for a single call; a key wins over an
            `op_id`. A name that no operation has is a warning.
        **by_op_id: the same, written as keywords.

    An inner overlay wins over an outer one; an explicit `cfg` wins over both.

    Example:
        >>> with overlay(scale="a configuration of the operation 'scale'"):
        ...     overlaid("scale", key="of any call")
        "a configuration of the operation 'scale'"
    """
    given = {**(configs or {}), **by_op_id}
    for name, config in given.items():
        check_config(config, f"the configuration for {name!r}")
        _warn_of_strangers(name)
    meant = {names.op_id_of(name) or name: config for name, config in given.items()}
    if len(meant) < len(given):
        raise ValueError(f"an overlay must name each operation once; got {', '.join(given)}.")
    merged = {**dict(_active.value), **meant}
    with _active(tuple(sorted(merged.items(), key=lambda item: item[0]))):
        yield


def _warn_of_strangers(name: str) -> None:
    """Warns where no kernel seen so far has a name. Keys are not names, and before the first kernel nothing is known."""
    known = names.known()
    if name.startswith("{") or name in known or not known:
        return
    near = names.nearest(name)
    hint = f"did you mean {near!r}?" if near else f"known are {', '.join(map(repr, known))}."
    warnings.warn(  # at the `with`: above this are the overlay and contextlib
        f"an overlay for {name!r}, a name that no operation seen so far has, so it changes nothing; {hint}",
        ConfigWarning,
        stacklevel=4,
    )


def active() -> tuple[tuple[str, Any], ...]:
    """The configurations of the overlays around this point, by name."""
    configurations: tuple[tuple[str, Any], ...] = _active.value
    return configurations


def carry(configs: tuple[tuple[str, Any], ...]) -> Any:
    """The context in which `active()` gives `configs`, for handing overlays to another thread."""
    return _active(configs)


def overlaid(op_id: str, key: str) -> Any | None:
    """The configuration that an overlay gives this call, or None."""
    if not _active.value:
        return None
    configs = dict(_active.value)
    names_of_it = (key, op_id, *names.aliases_of(op_id))  # an alias may have become known after the overlay began
    return next((configs[name] for name in names_of_it if name in configs), None)
