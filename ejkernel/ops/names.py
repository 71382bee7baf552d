"""The names of operations that this process has seen: what an overlay may name, and which names mean the same operation.

`Kernel` fills it: a subclass by its `op_id` and `aliases`, an instance that was given its `op_id`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any

from ejkernel.ops.key import is_op_id

_op_ids: dict[str, str] = {}  # by name: an op_id itself, or an alias of one


def declare(op_id: Any, aliases: Iterable[str] = ()) -> None:
    """Makes a name known, and other names for the same operation. One that no operation may have is refused later on."""
    if is_op_id(op_id):
        _op_ids[op_id] = op_id
        _op_ids.update({alias: op_id for alias in aliases if alias not in _op_ids})


def op_id_of(name: str) -> str | None:
    """The operation that a name means; None for a name that nobody has."""
    return _op_ids.get(name)


def aliases_of(op_id: str) -> tuple[str, ...]:
    """The other names of an operation."""
    return tuple(name for name, meant in _op_ids.items() if meant == op_id and name != op_id)


def nearest(name: str) -> str | None:
    """The name that somebody who wrote `name` probably meant; None where none is near."""
    return next(iter(difflib.get_close_matches(name, _op_ids, n=1)), None)


def known() -> list[str]:
    """Every name, aliases included."""
    return sorted(_op_ids)
