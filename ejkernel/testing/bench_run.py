"""How every GPU benchmark runs: part by part, each written when it is measured, within a time, going on where it stopped.

A part is what is measured at once: a row on one side. With `--json FILE` a part is a line of the file, and what the file has
for this code on this device is not measured again. With `--seconds-in-all` no part is begun for which too little time is left,
by the longest of its side so far. `--show` prints the tables again from such a file, on any machine.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ejkernel.testing.results import Line, Results, here, read

Found = Mapping[str, Any]
PROBLEM = "problem"  # of a part that cannot run: why
CHANGES = ("cfg", "plan", "batch", "tiny", "forward", "seconds")  # options with which a row is another one


class Run:
    """One run of a benchmark, by the options that all of them have."""

    @staticmethod
    def add_options(parser: argparse.ArgumentParser, rows: str = "'shape gate;'") -> None:
        """The options, and what the texts of --rows are looked for in."""
        parser.add_argument(
            "--json", metavar="FILE", help="figures go there as they are measured; what it has is not measured again"
        )
        parser.add_argument(
            "--rows", nargs="*", default=[""], metavar="TEXT", help=f"only rows whose {rows} contains one of these"
        )
        parser.add_argument("--show", action="store_true", help="measures nothing: what FILE has of its newest code and device")
        parser.add_argument("--seconds-in-all", type=float, default=float("inf"), metavar="S", help="ends before so many")

    def __init__(self, options: argparse.Namespace, clock: Callable[[], float] = time.monotonic):
        changed = {name: x for name in CHANGES if (x := getattr(options, name, None))}
        what = {"benchmark": Path(sys.argv[0]).stem, "with": changed}
        self.shows: bool = options.show
        self.results = Results(options.json, _newest(options.json, what) if self.shows else {**here("benchmarks"), **what})
        self.rows: list[str] = options.rows
        self._clock, self._seconds, self._begin = clock, options.seconds_in_all, clock()

    def asks_for(self, name: str) -> bool:
        """Whether --rows names a row."""
        return asked_for(self.rows, name)

    def knows(self, side: str, **row: Any) -> bool:
        """Whether this part is measured already."""
        known = self.results.of(**row, side=side)
        return known is not None and PROBLEM not in known

    def runnable(self, sides: Iterable[str], missing: Mapping[str, Callable[[], str | None]]) -> list[str]:
        """The sides that can run here, and stderr says which cannot; all of them where nothing is to be run.

        Args:
            missing: by side, what gives the reason why it cannot run, or None.
        """
        absent = {} if self.shows else {side: why for side in sides if side in missing and (why := missing[side]()) is not None}
        for side, why in absent.items():
            print(f"{side} is left out: {why}", file=sys.stderr)
        return [side for side in sides if side not in absent]

    def part(self, side: str, measure: Callable[[], Found], **row: Any) -> Line | None:
        """A row's figures on one side, known or measured now; None where it cannot run, and stderr says why, or is not shown.

        Raises:
            SystemExit: its time might not be enough.
        """
        key = {**row, "side": side}
        if self.knows(side, **row):
            return self.results.of(**key)
        if self.shows:
            return None
        begin = self._clock()
        if begin - self._begin + self._longest(side) > self._seconds:
            raise SystemExit(f"not within {self._seconds:g} s: {key} and what follows; the same command goes on from there")
        try:
            found = measure()
        except Exception as error:  # a part that cannot run must not take the others with it
            text = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:160]}"
            print(f"{side} leaves out {', '.join(map(str, row.values()))}: {text}", file=sys.stderr, flush=True)
            why = {PROBLEM: str(error)[:2000] or text, "traceback": traceback.format_exc()[-4000:]}
            self.results.add(key, **why, seconds=round(self._clock() - begin, 2))
            return None
        finally:
            gc.collect()  # memory for the next side
        return self.results.add(key, **found, seconds=round(self._clock() - begin, 2))

    def _longest(self, side: str) -> float:
        return max((line["seconds"] for line in self.results.lines if line["side"] == side), default=0.0)


def _newest(file: str | None, what: Mapping[str, Any]) -> Line:
    """What the last line of a benchmark in a file holds for."""
    lines = [] if file is None else [line for line in read(file) if what.items() <= line.items()]
    if not lines:
        raise SystemExit(f"--json {file} has nothing of {what}")
    return {name: lines[-1][name] for name in (*here(), *what) if name in lines[-1]}


def asked_for(texts: Iterable[str], name: str) -> bool:
    """Whether a row's name contains one of the texts."""
    return any(text in name for text in texts)


def by_row(lines: Iterable[Line], *names: str) -> list[Line]:
    """Lines of the sides of a row as one: what they agree on, and the line of each side by its name.

    Args:
        names: what a row is known by.

    Example:
        >>> row, = by_row([{"T": 8, "side": "ours", "ms": 1.0}, {"T": 8, "side": "fla", "ms": 2.0}], "T")
        >>> row["T"], row["ours"]["ms"], row["fla"]["ms"]
        (8, 1.0, 2.0)
    """
    rows: dict[tuple[Any, ...], Line] = {}
    for line in lines:
        if PROBLEM not in line and all(name in line for name in names):
            key = {name: line[name] for name in names}
            rows.setdefault(tuple(key.values()), key)[line["side"]] = line
    return list(rows.values())
