"""What every command shows things with: tables that fit the terminal, JSON, errors that say what to do."""

from __future__ import annotations

import json
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

_LEAST_WIDTH = 60  # narrower ones leave nothing of a table; a terminal that does not know its own says 0
_BAR = 10  # characters; the rest of the line is for what is being done
INTERRUPTED = 130  # the exit code of a command that was stopped by Ctrl-C


def screen() -> Console:
    """Standard output, as wide as the terminal (or `COLUMNS`); 80 where it is neither."""
    return _wide_enough(Console(highlight=False))


def side() -> Console:
    """Standard error: progress, warnings, errors."""
    return _wide_enough(Console(stderr=True, highlight=False))


def _wide_enough(console: Console) -> Console:
    console.width = max(console.width, _LEAST_WIDTH)
    return console


def print_json(content: Any) -> None:
    """One JSON document on standard output."""
    typer.echo(json_text(content))


def json_text(content: Any) -> str:
    """A JSON document. Numbers that JSON does not have are written as null.

    >>> json_text({"error": float("inf"), "times": (1.5,)}).split()
    ['{', '"error":', 'null,', '"times":', '[', '1.5', ']', '}']
    """
    return json.dumps(_finite(content), indent=1, allow_nan=False)


def _finite(content: Any) -> Any:
    if isinstance(content, dict):
        return {str(name): _finite(value) for name, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [_finite(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def fail(message: str, code: int = 1) -> NoReturn:
    """Says what went wrong and what to do on standard error, and exits."""
    tell(side(), message, "error: ", "bold red")
    raise typer.Exit(code)


def tell(console: Console, message: str, label: str = "", style: str = "") -> None:
    """A message after a label in that style: in one line where the output is no terminal, so that programs can read it."""
    text = label + message
    shown = Text(filled(text, console.width) if console.is_terminal else text)
    shown.stylize(style, 0, len(label))
    console.print(shown, soft_wrap=True)


def filled(text: str, width: int) -> str:
    """The text in lines that end between words. Paths and what stands between backticks stay whole, to be copied.

    >>> filled("tune it with `ejkernel tune --all` first", 24).splitlines()
    ['tune it with', '`ejkernel tune --all`', 'first']
    """
    lines: list[str] = []
    for given in text.split("\n"):
        line = given[: len(given) - len(given.lstrip())]  # what is indented stays so
        words = re.findall(r"(?:`[^`]*`|\S)+", given)
        for i, word in enumerate(words):
            if i and len(line) + 1 + len(word) > width:
                lines.append(line)
                line = word
            else:
                line += f" {word}" if i else word
        lines.append(line)
    return "\n".join(lines)


def wrong_use(message: str) -> NoReturn:
    """Says what is legal, and exits with 2."""
    fail(message, code=2)


def table(columns: Sequence[str], title: str | None = None) -> Table:
    """An empty table.

    Args:
        columns: headers. One that starts with ">" is right-aligned; "!" keeps its cells in one line.
    """
    made = Table(
        box=box.SIMPLE_HEAD, title=title, title_justify="left", title_style="bold", pad_edge=False, padding=(0, 1, 0, 0)
    )
    for column in columns:
        header = str(column)
        flags = header[: len(header) - len(header.lstrip(">!"))]
        name = column.lstrip(">!")
        justify: Any = "right" if ">" in flags else "left"
        made.add_column(name, justify=justify, no_wrap="!" in flags, min_width=len(name), overflow="fold")
    return made


@contextmanager
def progress(what: str, total: int, remaining: bool = False) -> Iterator[Callable[..., None]]:
    """A bar on standard error where that is a terminal; gives a function `step(text, done=1, share=0)`.

    `share` of the step that comes next moves the bar, and is forgotten with the next call.

    Args:
        remaining: show the time that is probably left instead of that which has gone by.
    """
    console = side()
    clock = TimeRemainingColumn() if remaining else TimeElapsedColumn()
    columns = [TextColumn("{task.description}"), BarColumn(_BAR), MofNCompleteColumn(), clock]
    columns += [TextColumn("left")] if remaining else []
    room = max(12, console.width - _BAR - 2 * len(str(total)) - len("/ 0:00:00  ") - 1 - len(" left") * remaining)
    finished = 0
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(what, total=total)

        def step(text: str, done: int = 1, share: float = 0.0) -> None:
            nonlocal finished
            finished += done
            bar.update(task, description=f"{what} {text}"[:room], completed=finished + share)

        yield step


def duration(seconds: float | None) -> str:
    """A time with three digits and its unit; "-" where there is none.

    >>> [duration(s) for s in (None, 9.25e-8, 1.5e-6, 0.0123, 2.0)]
    ['-', '0.0925 us', '1.50 us', '12.3 ms', '2.00 s']
    """
    if seconds is None or not math.isfinite(seconds):
        return "-"
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{_three(seconds / size)} {unit}"
    return f"{_three(seconds / 1e-6)} us"


def duration_in_words(seconds: float) -> str:
    """A long time, roughly.

    >>> [duration_in_words(s) for s in (5, 90, 1500, 9000)]
    ['5 s', '90 s', '25 minutes', '2.5 hours']
    """
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} minutes" if seconds < 7200 else f"{seconds / 3600:.1f} hours"


def ratio(value: float | None) -> str:
    """How many times, with two or three digits.

    >>> [ratio(x) for x in (None, 0.5, 3.14159, 27.3, 1234.0)]
    ['-', '0.500x', '3.14x', '27.3x', '1234x']
    """
    return "-" if value is None or not math.isfinite(value) else f"{_three(value)}x"


def small(value: float | None) -> str:
    """An error as text.

    >>> small(1.8e-7), small(None), small(float("inf"))
    ('1.8e-07', '-', 'inf')
    """
    return "-" if value is None else f"{value:.1e}" if math.isfinite(value) else "inf"


def count(number: int, thing: str) -> str:
    """How many of a thing.

    >>> count(1, "case"), count(3, "case")
    ('1 case', '3 cases')
    """
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _three(value: float) -> str:
    if 0.1 <= value < 1000:
        return f"{value:.{max(0, 2 - math.floor(math.log10(value)))}f}"
    return f"{value:.3g}" if value < 1 else f"{value:.0f}"


def show_warnings() -> None:
    """Warnings from now on in one line each on standard error, without the source line that gave them."""

    def show(message: Any, category: type[Warning], *_: Any, **__: Any) -> None:
        tell(side(), str(message), "warning: ", "bold yellow")

    warnings.showwarning = show


def interactive() -> bool:
    """Whether somebody can answer a question."""
    return sys.stdin is not None and sys.stdin.isatty()
