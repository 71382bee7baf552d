"""`overlay`: configurations that apply inside a `with` block.

The block is a JAX context, so functions that were jitted before it are traced again inside it and find what they had
before after it. It belongs to the thread that entered it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax

# At import, because JAX does not allow new contexts while other threads use it.
_active = jax.make_user_context(default_value=())


@contextmanager
def overlay(configs: Mapping[str, Any] | None = None, /, **by_op_id: Any) -> Iterator[None]:
    """Runs operations with the given configurations inside the block.

    Args:
        configs: configuration by `op_id`, or by `Invocation.key` for a single call; a key wins over an `op_id`.
        **by_op_id: the same, written as keywords.

    An inner overlay wins over an outer one; an explicit `cfg` wins over both.

    Example:
        >>> with overlay(scale="a configuration of the operation 'scale'"):
        ...     overlaid("scale", key="of any call")
        "a configuration of the operation 'scale'"
    """
    merged = {**dict(_active.value), **(configs or {}), **by_op_id}
    for name, config in merged.items():
        try:
            hash(config)
        except TypeError:
            raise TypeError(f"the configuration for {name!r} must be hashable (a frozen dataclass); got {config!r}.") from None
    with _active(tuple(sorted(merged.items(), key=lambda item: item[0]))):
        yield


def active() -> tuple[tuple[str, Any], ...]:
    """The configurations of the overlays around this point, by name."""
    return _active.value


def carry(configs: tuple[tuple[str, Any], ...]) -> Any:
    """The context in which `active()` gives `configs`, for handing overlays to another thread."""
    return _active(configs)


def overlaid(op_id: str, key: str) -> Any | None:
    """The configuration that an overlay gives this call, or None."""
    if not _active.value:
        return None
    configs = dict(_active.value)
    return configs.get(key, configs.get(op_id))
