"""Who is measured against whom: ours on every platform asked for, and the rivals that an operation's record names."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from ejkernel.cli._operations import Operation
from ejkernel.cli._screen import wrong_use
from ejkernel.testing.contenders import Contender, jitted

OURS = "ejkernel"


def contenders(op: Operation, platforms: Sequence[str], rivals: Sequence[str] | None) -> list[Contender]:
    """Ours, once for every platform named (once in all where none is), then the rivals of an operation.

    Args:
        rivals: names of its rivals; None: all that run here.
    """
    found = [_ours(op, platform, several=len(platforms) > 1) for platform in platforms or ("auto",)]
    for name, make in op.rivals.items():
        if rivals is None or name in rivals:
            rival = dataclasses.replace(make(op), name=name)
            if rivals is not None or rival.absent is None:
                found.append(rival)
    return found


def chosen_rivals(names: Sequence[str], operations: Sequence[Operation]) -> list[str] | None:
    """What `--compare` names; None where it names nothing, an empty list for "none"."""
    if not names:
        return None
    if list(names) == ["none"]:
        return []
    legal = list(dict.fromkeys(name for op in operations for name in op.rivals))
    unknown = [name for name in names if name not in legal]
    if unknown:
        whose = ", ".join(op.name for op in operations)
        said = f"of {', '.join(legal)} for {whose}, or none alone" if legal else f"none for {whose}, which has no rival"
        wrong_use(f"--compare must be {said}; got {', '.join(map(repr, unknown))}.")
    return list(names)


def _ours(op: Operation, platform: str, several: bool) -> Contender:
    absent = op.unavailable([platform]).get(platform) if platform != "auto" else None
    made = jitted(functools.partial(op.function, platform=platform), absent=absent)
    return dataclasses.replace(made, name=f"{OURS} {platform}" if several else OURS, platform=platform)
