"""`report`: what this process chose, for which calls, why."""

from __future__ import annotations

import os
import textwrap
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ejkernel.ops.config.codec import in_words, to_fields, unfit
from ejkernel.ops.config.validity import wrong_record
from ejkernel.ops.invocation import Invocation
from ejkernel.ops.tuner import OUT_OF_TIME

_LIMIT = 10_000
_COLUMNS = 80


@dataclass(frozen=True)
class Chosen:
    """One choice of this process.

    Attributes:
        op_id: the operation.
        arguments: its arrays and static values as text, by name.
        level: which level of the chain answered.
        config: the configuration.
        record: where it was measured: `seconds` of the winner and the heuristic, `candidates` with times or reasons,
            `tuning_seconds` that measuring took; where it was not, `not_tuned` says why.
        key: the call's key.
        invocation: the call itself, as shapes and static values.
        route: the name of the route that the call takes with the configuration; None where there is only one.
    """

    op_id: str
    arguments: Mapping[str, str]
    level: str
    config: Any
    record: Mapping[str, Any] = field(repr=False)
    key: str = field(repr=False)
    invocation: Invocation[Any, Any] | None = field(default=None, repr=False, compare=False)
    route: str | None = None

    @property
    def why(self) -> str:
        """How the level came to answer: that the call was tuned and how long it took, or why it was not; empty where the
        level's name says it all.
        """
        if wrong_record(self.record) is not None:
            return ""
        return "; ".join(filter(None, (_origin(self.level, self.record), self.record.get("note"))))


def _origin(level: str, record: Mapping[str, Any]) -> str:
    if level == "heuristics":
        if "failed" in record:
            return f"tuning failed{_taking(record)}, so this is the heuristic: {record['failed']}"
        return f"not tuned: {record['not_tuned']}" if "not_tuned" in record else ""
    if level == "autotune":
        candidates = record.get("candidates", ())
        timed = sum("seconds" in candidate for candidate in candidates)
        late = sum(OUT_OF_TIME in candidate.get("reason", "") for candidate in candidates)
        rest = f", {late} not reached in time" if late else ""
        kept = "; not stored, since nothing beside the heuristic was timed" if late and timed == 1 else ""
        return f"tuned in this process{_taking(record)}, {timed} of {len(candidates)} candidates timed{rest}{kept}"
    if level == "shipped" and "shipped_for" in record:
        return f"shipped for {record['shipped_for']}"
    return f"measured {record['time']}" if level in ("memory", "disk") and "time" in record else ""


def _taking(record: Mapping[str, Any]) -> str:
    return f" in {record['tuning_seconds']:.1f} s" if "tuning_seconds" in record else ""


class Report(tuple[Chosen, ...]):
    """Choices in the order they were first made; as text, a table with the losers below each measured one."""

    def __str__(self) -> str:
        if not self:
            return "no operation has been called in this process"
        return "\n".join(line for chosen in self for line in _lines(chosen))

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Writes the choices to a JSON file, with what is needed to make the same calls again.

        `ejkernel cache show --recorded FILE` shows them, `ejkernel tune --recorded FILE` tunes the calls ahead of the next run.
        """
        from ejkernel.ops.recording import save

        return save(self, path)


def _lines(chosen: Chosen) -> list[str]:
    wrong = wrong_record(chosen.record)
    seconds = None if wrong else chosen.record.get("seconds")
    time = "" if seconds is None else f"  {_duration(seconds)}"
    lines = _wrapped(f"{chosen.op_id}  {chosen.level}  {_words(chosen.config)}{time}", 0)
    lines += [] if chosen.route is None else _wrapped(f"route: {chosen.route}", 4)
    alike: dict[str, list[str]] = {}
    for name, text in chosen.arguments.items():
        alike.setdefault(text, []).append(name)
    lines += [line for text, names in alike.items() for line in _wrapped(f"{', '.join(names)}: {text}", 4)]
    if wrong:
        return [*lines, *_wrapped(f"its record is unreadable: {wrong}", 4)]
    if chosen.why:
        lines += _wrapped(chosen.why, 4)
    return lines + _losers(chosen.record.get("candidates", ()))


def _losers(candidates: Sequence[Mapping[str, Any]]) -> list[str]:
    """What was measured, fastest first, then what could not be, with the reason."""
    timed = sorted((c for c in candidates if not c.get("reason")), key=lambda c: c["seconds"])
    words = {id(c): _field_words(c["config"]) for c in candidates}
    width = max(map(len, words.values()), default=0)
    lines = [f"      {words[id(c)]:{width}}  {_duration(c['seconds']):>10}" for c in timed]
    failed = [c for c in candidates if c.get("reason")]
    return lines + [line for c in failed for line in _wrapped(f"{words[id(c)]:{width}}  {c['reason']}", 6, width + 2)]


def _words(config: Any) -> str:
    """A configuration in a few words; one that names no platform as Python writes it."""
    return in_words(to_fields(config)) if hasattr(config, "platform") and unfit(config) is None else repr(config)


def _field_words(fields: Mapping[str, Any]) -> str:
    return in_words(fields) if "platform" in fields else ", ".join(f"{name}={value}" for name, value in fields.items())


def _wrapped(text: str, indent: int, hanging: int = 2) -> list[str]:
    """Lines of at most 80 columns; a word is never broken, so that names and shapes can be copied."""
    if len(text) + indent <= _COLUMNS:
        return [" " * indent + text]
    later = " " * (indent + hanging)
    wrapper = textwrap.TextWrapper(_COLUMNS, " " * indent, later, break_long_words=False, break_on_hyphens=False)
    return wrapper.wrap(text)


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms" if seconds >= 1e-4 else f"{seconds * 1e6:.1f} us"


_choices: dict[tuple[str, str, str], Chosen] = {}
_lock = threading.Lock()


def describe(inv: Invocation[Any, Any], level: str, config: Any, record: Mapping[str, Any]) -> Chosen:
    """A choice as the report shows it."""
    arguments = {**inv.shapes, **inv.static, **{f"{name} placed": text for name, text in inv.placement.items()}}
    return Chosen(inv.kernel.op_id, arguments, level, config, record, inv.key, inv, inv.kernel.route(inv, config))


def note(inv: Invocation[Any, Any], level: str, config: Any, record: Mapping[str, Any]) -> None:
    """Adds a choice to the report, once per key, level and configuration.

    Memory mostly repeats what disk or tuning said before, so it is listed only where neither did.
    """
    chosen = describe(inv, level, config, record)
    before = ("disk", "autotune") if level == "memory" else ()
    with _lock:
        if any((chosen.key, other, repr(config)) in _choices for other in (level, *before)):
            return
        _choices[chosen.key, level, repr(config)] = chosen
        if len(_choices) > _LIMIT:  # a program that never repeats a shape must not grow for ever
            del _choices[next(iter(_choices))]


def report() -> Report:
    """Every choice of this process: operation, shapes, the level that answered, configuration, times, losers with reasons.

    Of a call that nothing was known about it says whether it was tuned and how long that took, or why it was not.

    Calls that repeat a choice already listed are not listed again. Print it for a table.
    """
    with _lock:
        return Report(_choices.values())


def clear_report() -> None:
    """Forgets the choices listed so far."""
    with _lock:
        _choices.clear()
