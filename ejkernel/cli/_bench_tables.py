"""The tables of `ejkernel bench`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from ejkernel.cli._contenders import OURS
from ejkernel.cli._measure import Measured
from ejkernel.cli._screen import duration, ratio, small, table


def show(console: Console, measured: Sequence[Measured], headline: str, peaks: dict[str, float], summary_only: bool) -> None:
    """Prints a table per operation, shape and direction, then one line per operation.

    Args:
        headline: where and when it was measured.
        peaks: operations per second by dtype.
    """
    console.print(headline)
    rates = ", ".join(f"{rate / 1e9:.3g} GFLOP/s ({dtype})" for dtype, rate in peaks.items())
    console.print("time: best of several calls; error: relative RMS against float64")
    console.print(f"floor: bytes at a copy's rate or operations at {rates}, measured")
    if not summary_only:
        for family, direction in dict.fromkeys((one.family, one.direction) for one in measured):
            rows = [one for one in measured if (one.family, one.direction) == (family, direction)]
            console.print()
            console.print(_details(rows, f"{family[0]} {family[1]}, {direction}"))
            for line in _routes(rows):
                console.print(line)
    _reasons(console, measured)
    found = _summary(measured)
    if found is not None:
        console.print()
        console.print(found)


def _details(rows: Sequence[Measured], title: str) -> Any:
    error = "!>error" if rows[0].direction == "forward" else "!>worst grad"
    made = table(["!>T", "!implementation", "!>time", "!>x ours", "!>floor", "!>x floor", error], title)
    before, first_of_ours = None, _first_of_ours(rows)
    for one in rows:
        first = one.tokens != before
        before = one.tokens
        ours = _seconds(rows, one.tokens, first_of_ours)
        against = None if ours is None or one.seconds is None or one.ours else one.seconds / ours
        value = one.output_error if one.direction == "forward" else one.gradient_error
        made.add_row(
            str(one.tokens) if first else "",
            Text(one.contender, "bold" if one.ours else ""),
            duration(one.seconds),
            "" if one.ours else ratio(against),
            f"{duration(one.floor_seconds)}" if first else "",
            ratio(one.distance),
            small(value),
        )
    return made


def _routes(rows: Sequence[Measured]) -> list[str]:
    """How ours computed it, with the lengths where not all took the same way."""
    at: dict[tuple[str, str], list[str]] = {}
    for one in rows:
        if one.route:
            at.setdefault((one.contender, one.route), []).append(str(one.tokens))
    several = len(at) > len({contender for contender, _ in at})
    where = lambda tokens: f" at T = {', '.join(tokens)}" if several else ""
    return [f"route of {contender}{where(tokens)}: {route}" for (contender, route), tokens in at.items()]


def _first_of_ours(rows: Sequence[Measured]) -> str:
    """What others are compared with: ours on the platform that was named first."""
    return next((one.contender for one in rows if one.ours), OURS)


def _seconds(rows: Sequence[Measured], tokens: int, contender: str) -> float | None:
    return next((one.seconds for one in rows if one.tokens == tokens and one.contender == contender), None)


def _reasons(console: Console, measured: Sequence[Measured]) -> None:
    missing: dict[tuple[str, str], list[str]] = {}
    for one in measured:
        if one.reason:
            missing.setdefault((one.contender, one.reason), []).append(one.operation)
    for (contender, reason), names in missing.items():
        console.print(Text.assemble((f"{contender} did not run", "yellow"), f" ({', '.join(dict.fromkeys(names))}): {reason}"))


def _summary(measured: Sequence[Measured]) -> Any | None:
    """One line per operation and shape at its greatest length; None where there is nothing to compare ours with."""
    made = table(
        ["operation", "!>T", "!>error", "!>gradients", "!against", "!>forward", "!>+backward"], "ejkernel, times faster"
    )
    for family in dict.fromkeys(one.family for one in measured):
        mine = [one for one in measured if one.family == family and one.seconds is not None]
        rival = next((one.contender for one in mine if not one.ours), None)  # the first: what people have without this library
        ours = [one for one in mine if one.contender == _first_of_ours(mine)]
        if rival is None or not ours:
            continue
        tokens = max(one.tokens for one in ours)
        last = [one for one in ours if one.tokens == tokens]
        faster = []
        for direction in ("forward", "forward+backward"):
            mine_there = next((one.seconds for one in last if one.direction == direction), None)
            its = _seconds([one for one in mine if one.direction == direction], tokens, rival)
            faster.append(None if not mine_there or its is None else its / mine_there)
        gates = family[1].split(":")[1:-1]
        made.add_row(
            ", ".join([family[0], *gates]),
            str(tokens),
            small(max((one.output_error for one in last if one.output_error is not None), default=None)),
            small(max((one.gradient_error for one in last if one.gradient_error is not None), default=None)),
            rival,
            *map(ratio, faster),
        )
    return made if made.row_count else None
