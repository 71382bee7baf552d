"""The picture of a benchmark: time over length and distance to the floor, one row per operation and shape."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ejkernel.cli._measure import Measured
from ejkernel.testing.timing import DIRECTIONS

_OURS = ("#0b6e99", "#14a3a8", "#1b4965", "#62b6cb")  # shades of one colour, a platform each
_OTHERS = ("#c8553d", "#6a994e", "#7b5ea7", "#e09f3e", "#540b0e")
_FLOOR = "#777777"


def draw(measured: Sequence[Measured], file: Path, title: str) -> Path:
    """Saves the picture; the file's suffix says its format.

    Raises:
        ValueError: nothing was measured, or the format is unknown.
    """
    import matplotlib

    matplotlib.use("Agg")  # no window
    from matplotlib import pyplot

    ran = [one for one in measured if one.seconds is not None]
    if not ran:
        raise ValueError("there is nothing to plot: no measurement succeeded")
    families = list(dict.fromkeys(one.family for one in ran))
    directions = [direction for direction in DIRECTIONS if any(one.direction == direction for one in ran)]
    columns = len(directions) + 1
    size = (4.3 * columns, 3.1 * len(families) + 0.6)
    figure, grid = pyplot.subplots(len(families), columns, figsize=size, squeeze=False, layout="constrained")
    colours = _colours(ran)
    for row, family in zip(grid, families, strict=True):
        mine = [one for one in ran if one.family == family]
        for axes, direction in zip(row, directions, strict=False):
            _times(axes, [one for one in mine if one.direction == direction], colours)
            axes.set_title(f"{family[0]}, {direction}", fontsize=10)
            axes.annotate(family[1], (0.03, 0.93), xycoords="axes fraction", fontsize=7.5, color="#555555")
        _distances(row[-1], mine, colours, directions)
        row[-1].set_title(f"{family[0]}, distance to the floor", fontsize=10)
    figure.suptitle(title, fontsize=11)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)
    return file


def _colours(ran: Sequence[Measured]) -> dict[str, str]:
    """Blues for ours; of the others, the first of every operation has the same colour."""
    colours: dict[str, str] = {}
    for operation in dict.fromkeys(one.operation for one in ran):
        for ours, palette in ((True, _OURS), (False, _OTHERS)):
            names = dict.fromkeys(one.contender for one in ran if one.operation == operation and one.ours is ours)
            for number, name in enumerate(names):
                colours.setdefault(name, palette[number % len(palette)])
    return colours


def _times(axes: Any, mine: Sequence[Measured], colours: dict[str, str]) -> None:
    for name in dict.fromkeys(one.contender for one in mine):
        line = sorted((one.tokens, one.seconds * 1e3) for one in mine if one.contender == name and one.seconds is not None)
        axes.plot(*zip(*line, strict=True), marker="o", markersize=4, color=colours[name], label=name)
    least = sorted({(one.tokens, one.floor_seconds * 1e3) for one in mine})
    if least:
        axes.plot(*zip(*least, strict=True), linestyle=":", marker=".", color=_FLOOR, label="floor")
    axes.set_ylabel("milliseconds")
    _finish(axes, mine)
    _legend(axes, loc="best")


def _distances(axes: Any, mine: Sequence[Measured], colours: dict[str, str], directions: Sequence[str]) -> None:
    for name in dict.fromkeys(one.contender for one in mine):
        for direction in directions:
            line = sorted(
                (one.tokens, one.distance)
                for one in mine
                if one.contender == name and one.direction == direction and one.distance is not None
            )
            if line:
                style = "--" if direction == "forward" and len(directions) > 1 else "-"
                axes.plot(*zip(*line, strict=True), linestyle=style, marker="o", markersize=4, color=colours[name])
    if len(directions) > 1:
        axes.plot([], [], linestyle="--", color="black", label="forward")
        axes.plot([], [], linestyle="-", color="black", label="forward+backward")
    axes.axhline(1, linestyle=":", color=_FLOOR, label="floor")
    axes.set_ylabel("times the floor")
    _finish(axes, mine)
    axes.set_ylim(bottom=min(axes.get_ylim()[0], 0.4))  # room for the legend where no line can be: below the floor
    _legend(axes, loc="lower center", ncols=3)


def _finish(axes: Any, mine: Sequence[Measured]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    tokens = sorted({one.tokens for one in mine})
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(tokens, [str(count) for count in tokens])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("tokens, T")
    axes.grid(True, which="major", color="#e6e6e6", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.margins(y=0.22)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _legend(axes: Any, **where: Any) -> None:
    axes.legend(fontsize=7, framealpha=0.8, edgecolor="none", **where)
