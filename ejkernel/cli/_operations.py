"""The options that name operations, platforms, gates and dtypes, checked against the records of all operations."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

from ejkernel._elsewhere import UNTUNED, hint_for
from ejkernel.cli._screen import wrong_use
from ejkernel.kernels._registry import Platform
from ejkernel.testing.record import Record, find, records
from ejkernel.testing.shapes import DTYPES, dtype_hint, gate_hint

Operation = Record[Any]


def name_of(op_id: str) -> str:
    """The name that users call an operation by; the registry's own where it has no record."""
    record = find(op_id)
    return op_id if record is None else record.name


def words(option: str, values: Sequence[str] | None) -> list[str]:
    """The words of an option that may be repeated or hold several, separated by commas.

    Left out, an option often means everything. Given empty, as an unset variable of a shell gives it, it means nothing.
    """
    found = [word.strip() for value in values or () for word in value.split(",") if word.strip()]
    if values and not found:
        wrong_use(f"{option} was given with nothing in it; name what it is for, or leave it out.")
    return found


def chosen_operations(values: Sequence[str] | None) -> list[Operation]:
    """The operations that an option names; all where it names none."""
    named = words("--op", values)
    unknown = [word for word in named if find(word) is None]
    if unknown:
        hints = "".join(f" {_operation_hint(word)}" for word in unknown if _operation_hint(word))
        wrong_use(f"--op must be one of {legal_operations()}; got {', '.join(map(repr, unknown))}.{hints}")
    return [op for op in records() if not named or any(map(op.answers_to, named))]


def _operation_hint(word: str) -> str:
    """A word on a name that is no operation of the command's; empty where there is none to say."""
    meant = UNTUNED.get(word) or hint_for(word)
    return f"{word}: {meant}." if meant else ""


def legal_operations() -> str:
    """The names of all operations, as errors list them."""
    return ", ".join(op.name if op.name == op.op_id else f"{op.name} ({op.op_id})" for op in records())


def chosen_platforms(values: Sequence[str] | None, auto: bool = True) -> list[str]:
    """The platforms that an option names; none where it names none.

    Args:
        auto: whether "auto" is one of them.
    """
    named = words("--platform", values)
    legal = [*map(str, Platform), *(["auto"] if auto else [])]
    unknown = [word for word in named if word not in legal]
    if unknown:
        wrong_use(f"--platform must be one of {', '.join(legal)}; got {', '.join(map(repr, unknown))}.")
    return named


def chosen_dtypes(values: Sequence[str] | None, legal: Sequence[str] = DTYPES) -> list[str]:
    """The dtypes that an option names; none where it names none."""
    named = words("--dtype", values)
    unknown = [word for word in named if word not in legal]
    if unknown:
        wrong_use(f"--dtype must be one of {', '.join(legal)}; got {', '.join(map(repr, unknown))}.{dtype_hint(unknown)}")
    return named


def chosen_gates(text: str | None, operations: Sequence[Operation]) -> tuple[str, ...] | None:
    """The gates that an option names, `()` for "none", None where it was not given."""
    if text is None:
        return None
    refuse_without_gates("--gates", operations)
    legal = list(dict.fromkeys(gate for op in operations for gate in op.legal_gates))
    named = () if text == "none" else tuple(part for word in words("--gates", [text]) for part in word.split("+"))
    unknown = [word for word in named if word not in legal]
    if unknown:
        wrong_use(f"--gates must be of {', '.join(legal)}, or none; got {', '.join(map(repr, unknown))}.{gate_hint(unknown)}")
    return named


def refuse_without_gates(option: str, operations: Sequence[Operation]) -> None:
    """Exits where an option is about gates and no operation has any."""
    if not any(op.legal_gates for op in operations):
        names = ", ".join(op.name for op in operations)
        wrong_use(f"{option} does not go together with {names}, which takes no gates.")


def shape_of(op: Operation, text: str, gates: tuple[str, ...] | None, dtype: str) -> Any:
    """The shape that a text means for an operation; exits with what is legal when it means none.

    Args:
        gates: for operations that have gates, those of shapes that name none; None: the operation's own.
    """
    try:
        return op.shape(text, gates if op.legal_gates else None, dtype)
    except ValueError as problem:
        wrong_use(str(problem))


def load_modules(values: Sequence[str] | None) -> None:
    """Imports modules that register operations or implementations of their own."""
    for name in words("--load", values):
        try:
            importlib.import_module(name)
        except ImportError as problem:
            wrong_use(f"--load {name}: {problem}. Name a module that Python finds, with PYTHONPATH set where it needs to be.")
