"""`ejkernel bench`: times on this device, with errors and floors beside them."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ejkernel.cli import _bench_tables, _options
from ejkernel.cli._contenders import chosen_rivals, contenders
from ejkernel.cli._measure import Measured, Settings, measure
from ejkernel.cli._operations import (
    Operation,
    chosen_dtypes,
    chosen_gates,
    chosen_operations,
    chosen_platforms,
    load_modules,
    refuse_without_gates,
    shape_of,
    words,
)
from ejkernel.cli._screen import INTERRUPTED, fail, json_text, print_json, progress, screen, side, tell, wrong_use
from ejkernel.testing.record import Sizes, find, records
from ejkernel.testing.timing import DIRECTIONS

FORMAT = 1
_RIVALS = dict.fromkeys(name for op in records() for name in op.rivals)  # of this library's operations


def bench(
    op: _options.Ops = None,
    shapes: _options.Shapes = None,
    lengths: Annotated[
        str | None, typer.Option(metavar="LIST", help="Measure each shape at these lengths T: 512,1024,2048.")
    ] = None,
    gates: _options.Gates = None,
    dtype: _options.Dtype = None,
    direction: Annotated[str, typer.Option(metavar="WHICH", help="forward, forward+backward or both.")] = "both",
    platform: _options.Platforms = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(metavar="LIST", help=f"Against: {', '.join(_RIVALS)}, or none. All that run here when left out."),
    ] = None,
    seconds: Annotated[float, typer.Option(metavar="S", help="Time for each measurement, after compiling.")] = 1.0,
    no_error: Annotated[bool, typer.Option("--no-error", help="Times only.")] = False,
    strong_gates: Annotated[
        bool, typer.Option("--strong-gates", help="Some runs of strong gates and resets among the weak gates, as tuning has.")
    ] = False,
    summary: Annotated[bool, typer.Option("--summary", help="Only the last table: one line per operation.")] = False,
    save: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write everything as JSON.")] = None,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also draw time over T and distance to the floor (.png, .svg, .pdf).")
    ] = None,
    from_file: Annotated[
        Path | None, typer.Option("--from", metavar="FILE", help="Show or plot what --save wrote, measuring nothing.")
    ] = None,
    load: _options.Load = None,
    as_json: _options.Json = False,
) -> None:
    """Time the operations on this device, with error and floor beside.

    Ours against what people would use instead, as far as it runs here. A time is the best of several calls. Errors are
    relative RMS against float64, of the last 256 tokens (two heads) of long calls. The floor is the larger of bytes over
    bandwidth and operations over peak, both measured on this device. Exits with 1 when ours does not run.

    \b
    Examples:
      ejkernel bench --op gla_attention
      ejkernel bench --op recurrent_attention --shapes 2x4096x4x64x64:gk+gv
      ejkernel bench --op attention --lengths 512,2048 --compare jax.nn
      ejkernel bench --save run.json --plot run.png
      ejkernel bench --from run.json --plot run.svg
    """
    _check(plot, seconds)
    load_modules(load)
    if from_file is not None:
        measuring = {
            "--op": op, "--shapes": shapes, "--lengths": lengths, "--gates": gates, "--dtype": dtype, "--platform": platform,
            "--compare": compare, "--direction": direction != "both", "--seconds": seconds != 1.0, "--no-error": no_error,
            "--strong-gates": strong_gates, "--load": load,
        }  # fmt: skip
        given = [name for name, value in measuring.items() if value]
        if given:
            wrong_use(f"--from shows what was measured before; it does not go together with {', '.join(given)}.")
        about, measured = _read(from_file)
        interrupted = False
    else:
        settings = Settings(_directions(direction), seconds, not no_error, strong_gates)
        operations, platforms = chosen_operations(op), chosen_platforms(platform)
        rivals = chosen_rivals(words("--compare", compare), operations)
        calls = _calls(operations, shapes, lengths, gates, dtype)
        if strong_gates:
            refuse_without_gates("--strong-gates", operations)
        measured, interrupted = _run(calls, platforms, rivals, settings)
        measured = _with_best_floors(measured)
        about = _about({call.dtype for _, call in calls}, strong_gates)
    content = {"format": FORMAT, "about": about, "measurements": [dataclasses.asdict(one) for one in measured]}
    if save is not None:
        _write(save, content)
    drawn = None if plot is None else _draw(measured, plot, about)
    if as_json:
        print_json(content)
    else:
        _bench_tables.show(screen(), measured, _headline(about), about["operations_per_second"], summary)
        for what, file in (("JSON", save), ("picture", drawn)):
            if file is not None:
                tell(screen(), f"{what}: {file}")
    if interrupted:
        side().print("interrupted: not everything was measured")
        raise typer.Exit(INTERRUPTED)
    broken = [one for one in measured if one.ours and one.seconds is None]
    raise typer.Exit(1 if broken else 0)


def _check(plot: Path | None, seconds: float) -> None:
    if plot is not None and importlib.util.find_spec("matplotlib") is None:
        wrong_use('--plot needs matplotlib: pip install matplotlib, or ".[cli,plot]" in the checkout of this library.')
    if plot is not None and plot.suffix not in (".png", ".svg", ".pdf"):
        wrong_use(f"--plot must name a .png, .svg or .pdf file; got {str(plot)!r}.")
    if not seconds > 0:
        wrong_use(f"--seconds must be positive; got {seconds:g}.")


def _directions(text: str) -> tuple[str, ...]:
    if text not in ("both", *DIRECTIONS):
        wrong_use(f"--direction must be forward, forward+backward or both; got {text!r}.")
    return DIRECTIONS if text == "both" else (text,)


def _calls(
    operations: Sequence[Operation], shapes: Sequence[str] | None, lengths: str | None, gates: str | None, dtype: str | None
) -> list[tuple[Operation, Any]]:
    """Every operation with every shape that is to be measured."""
    from ejkernel._device import backend_of, default_device

    backend, tokens, named = backend_of(default_device()), _lengths(lengths), chosen_gates(gates, operations)
    kind = next(iter(chosen_dtypes(None if dtype is None else [dtype])), None)
    calls: list[tuple[Operation, Any]] = []
    for op in operations:
        texts = words("--shapes", shapes) or op.usual_shapes(backend)
        asked = [shape_of(op, text, named, kind or op.usual_dtype(backend)) for text in texts]
        at_lengths = [dataclasses.replace(shape, time=time) for shape in asked for time in tokens or [shape.time]]
        calls += [(op, shape) for shape in dict.fromkeys(at_lengths)]
    if any(shape.time < 1 for _, shape in calls):
        wrong_use("a shape to be measured must have at least one token.")
    return calls


def _lengths(text: str | None) -> list[int]:
    found = words("--lengths", None if text is None else [text])
    if any(not word.isdigit() or int(word) < 1 for word in found):
        wrong_use(f"--lengths must be positive whole numbers separated by commas; got {text!r}.")
    return [int(word) for word in found]


def _run(
    calls: Sequence[tuple[Operation, Sizes]],
    platforms: Sequence[str],
    rivals: Sequence[str] | None,
    settings: Settings,
) -> tuple[list[Measured], bool]:
    """What was measured, and whether it was interrupted before the end."""
    measured: list[Measured] = []
    who = {op.name: contenders(op, platforms, rivals) for op, _ in calls}
    total = sum(len(settings.directions) * len(who[op.name]) for op, _ in calls)
    with progress("timing", total) as step:
        for op, shape in calls:
            for what, do in measure(op, shape, who[op.name], settings):
                step(what, 0)
                try:
                    measured.append(do())
                except KeyboardInterrupt:
                    return measured, True
                step(what)
    return measured, False


def _with_best_floors(measured: Sequence[Measured]) -> list[Measured]:
    """The same with floors from the best rates that the device showed before and after."""
    from ejkernel.testing.floors import refresh

    refresh()
    again: list[Measured] = []
    for one in measured:
        op = find(one.operation)
        assert op is not None
        least = op.floor(op.shape(one.shape, gates=()), one.direction)  # its text has all the gates that it has
        again.append(dataclasses.replace(one, floor_seconds=least.seconds, bound=least.bound))
    return again


def _about(dtypes: set[str], strong_gates: bool) -> dict[str, Any]:
    """Where and how the times were measured."""
    from datetime import UTC, datetime

    from ejkernel._device import default_device
    from ejkernel.ops.key import environment
    from ejkernel.testing.floors import arithmetic

    return {
        "environment": environment(default_device()),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "operations_per_second": {dtype: arithmetic(dtype) for dtype in sorted(dtypes)},
        "gates": "weak, some runs of tokens strong or with a reset" if strong_gates else "weak",
        "floor": "max(bytes / bandwidth of a copy of that size, operations / rate of a matrix product), both measured here",
    }


def _headline(about: dict[str, Any]) -> str:
    where = about["environment"]
    return f"ejkernel {where['ejkernel']}, jax {where['jax']}, {where['device']}, {about['time'][:10]}"


def _write(file: Path, content: dict[str, Any]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json_text(content) + "\n", encoding="utf-8")
    except OSError as problem:
        fail(f"{file} cannot be written: {problem.strerror}.")


def _read(file: Path) -> tuple[dict[str, Any], list[Measured]]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        if content.get("format") != FORMAT:
            raise ValueError(f"expected format {FORMAT}")
        about = content["about"]
        if not isinstance(about["operations_per_second"], dict) or not _headline(about):
            raise ValueError("it does not say where it was measured")
        return about, [Measured(**one) for one in content["measurements"]]
    except OSError as problem:
        wrong_use(f"{file} cannot be read: {problem.strerror}.")
    except (ValueError, KeyError, TypeError, AttributeError) as problem:
        fail(f"{file} is not what bench --save writes: {problem}.")


def _draw(measured: Sequence[Measured], file: Path, about: dict[str, Any]) -> Path:
    from ejkernel.cli._plot import draw

    try:
        return draw(measured, file, _headline(about))
    except (ValueError, OSError) as problem:
        fail(f"no picture: {problem}.")
