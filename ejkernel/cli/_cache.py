"""`ejkernel cache`: what was tuned, by whom, and carrying it elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from ejkernel.cli import _options
from ejkernel.cli._entries import (
    Entry,
    check_writable,
    operation_folders,
    recorded_entries,
    shipped_entries,
    stored_entries,
)
from ejkernel.cli._operations import name_of, words
from ejkernel.cli._screen import count, duration, fail, interactive, print_json, ratio, screen, table, tell, wrong_use
from ejkernel.ops.config import exchange
from ejkernel.ops.config.persistent import (
    VARIABLE,
    NoFolderError,
    PersistentCache,
    cache_folder,
    expanded,
    write_atomically,
)
from ejkernel.testing.record import find, records

app = typer.Typer(
    help="List, show, export, import and clear tuned configurations.", no_args_is_help=True, rich_markup_mode=None
)
Ids = Annotated[list[str] | None, typer.Argument(metavar="ID", help="The beginning of an id that `cache list` shows.")]
All = Annotated[bool, typer.Option("--all", help="Also what was measured on other devices or with other versions.")]


@app.command("list")
def list_(
    context: typer.Context,
    op: _options.Ops = None,
    everything: All = False,
    recorded: _options.Recorded = None,
    cache_dir: _options.CacheDir = None,
    as_json: _options.Json = False,
) -> None:
    """List what was picked, by which level, with times.

    Levels: disk (tuned before and stored), shipped (comes with the package), and with --recorded whatever chose in that run:
    explicit, overlay, memory, disk, shipped, autotune or heuristics.

    \b
    Examples:
      ejkernel cache list
      ejkernel cache list --op gla_attention --all
      ejkernel cache list --recorded run.json
    """
    _refuse_idle_folder(context, recorded)
    folder = _folder(cache_dir)
    entries = _entries(folder, op, recorded)
    shown = [entry for entry in entries if everything or recorded is not None or entry.here]
    if as_json:
        print_json({"folder": str(folder), "entries": [entry.as_json() for entry in shown]})
        return
    console = screen()
    if shown:
        console.print(_listing(shown))
    hidden = len(entries) - len(shown)
    origin = str(folder) if recorded is None else str(recorded)
    broken = sum(entry.unreadable is not None for entry in shown)
    more = f", {broken} of them unreadable" if broken else ""
    more += f", {hidden} for other devices or versions (--all lists them)" if hidden else ""
    tell(console, f"{origin}: {count(len(shown), 'choice' if recorded else 'tuned call')}{more}")
    if not entries and recorded is None:
        example = records()[0]
        console.print(f"Tune some with `ejkernel tune --op {example.name} --shapes {example.usual_shapes('cpu')[0]}`.")


@app.command()
def show(
    context: typer.Context,
    ids: Ids = None,
    op: _options.Ops = None,
    everything: All = False,
    recorded: _options.Recorded = None,
    cache_dir: _options.CacheDir = None,
    as_json: _options.Json = False,
) -> None:
    """Show choices in full: the call, times, losers and reasons.

    \b
    Examples:
      ejkernel cache show 3f2a
      ejkernel cache show --op gla_attention
      ejkernel cache show --recorded run.json
    """
    _refuse_idle_folder(context, recorded)
    folder = _folder(cache_dir)
    entries = _entries(folder, op, recorded)
    if ids:
        chosen = _with_ids(entries, ids)
    else:
        chosen = [entry for entry in entries if everything or recorded is not None or entry.here]
    if as_json:
        print_json({"folder": str(folder), "entries": [entry.as_json() for entry in chosen]})
        return
    for entry in chosen:
        _describe(screen(), entry)
    if not chosen:
        tell(screen(), f"nothing to show in {recorded or folder}; `ejkernel cache list --all` lists everything.")


@app.command("export")
def export(
    file: Annotated[Path | None, typer.Argument(metavar="FILE", help="Where to; - or nothing: standard output.")] = None,
    op: _options.Ops = None,
    cache_dir: _options.CacheDir = None,
    as_json: _options.Json = False,
) -> None:
    """Write tuned configurations to one file, for another machine.

    The file has everything in the cache, whichever device it was measured on; a call only uses what fits its own. With --json,
    what was written is summed up as JSON.

    \b
    Examples:
      ejkernel cache export tuned.json
      ejkernel cache export - --op gla_attention | ssh other 'cat > tuned.json'
    """
    folder = _folder(cache_dir)
    op_ids = _op_ids(op, operation_folders(folder))
    caches = [PersistentCache.of_folder(folder / name) for name in operation_folders(folder) if not op_ids or name in op_ids]
    text = exchange.dumps(*caches) if caches else exchange.merge()
    number = len(exchange.parse(text))
    if file is None or str(file) == "-":
        typer.echo(text, nl=False)
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(file, text)
    except OSError as problem:
        fail(f"{file} cannot be written: {problem.strerror}.")
    if as_json:
        print_json({"file": str(file), "exported": number})
    else:
        tell(screen(), f"{count(number, 'tuned call')} written to {file}")


@app.command("import")
def import_(
    files: Annotated[list[Path], typer.Argument(metavar="FILE", help="What `cache export` wrote; - for standard input.")],
    cache_dir: _options.CacheDir = None,
    as_json: _options.Json = False,
) -> None:
    """Add tuned configurations from files; the newer of two stays.

    A file that is damaged is refused as a whole, and then nothing of any file is added.

    \b
    Examples:
      ejkernel cache import tuned.json
      ejkernel cache import a100.json h100.json
    """
    folder = _folder(cache_dir)
    merged = exchange.merge(*(_text(file) for file in files))
    check_writable(folder, "nothing would be imported")
    taken = exchange.loads(merged, PersistentCache(records()[0].op_id, folder))
    offered = len(exchange.parse(merged))
    if as_json:
        print_json({"folder": str(folder), "offered": offered, "imported": taken})
    else:
        kept = f"; {offered - taken} were there already, as new or newer" if offered > taken else ""
        tell(screen(), f"{count(taken, 'tuned call')} added to {folder}{kept}")


@app.command()
def clear(
    ids: Ids = None,
    op: _options.Ops = None,
    stale: Annotated[
        bool, typer.Option("--stale", help="Only what was measured on other devices or with other versions.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    cache_dir: _options.CacheDir = None,
    as_json: _options.Json = False,
) -> None:
    """Remove tuned configurations from the cache.

    \b
    Examples:
      ejkernel cache clear 3f2a
      ejkernel cache clear --stale --yes
      ejkernel cache clear --op attention
    """
    folder = _folder(cache_dir)
    entries = _named(stored_entries(folder), _op_ids(op, operation_folders(folder)))
    chosen = [entry for entry in (_with_ids(entries, ids) if ids else entries) if not stale or not entry.here]
    if chosen and not yes:
        if as_json or not interactive():
            wrong_use(
                f"{count(len(chosen), 'tuned call')} would be removed from {folder}; say --yes where nobody can be asked."
            )
        typer.confirm(f"Remove {count(len(chosen), 'tuned call')} from {folder}?", abort=True)
    for entry in chosen:
        try:
            assert entry.file is not None  # it comes from the disk
            entry.file.unlink(missing_ok=True)
        except OSError as problem:
            fail(f"{folder} does not allow it: {problem.strerror}.")
    if as_json:
        print_json({"folder": str(folder), "removed": [entry.id for entry in chosen]})
    else:
        tell(screen(), f"{count(len(chosen), 'tuned call')} removed from {folder}")


def _folder(cache_dir: Path | None) -> Path:
    try:
        return cache_folder() if cache_dir is None else expanded(cache_dir)
    except NoFolderError as problem:
        wrong_use(f"{problem}. Name another folder with --cache-dir or {VARIABLE}.")


def _op_ids(op: Sequence[str] | None, others: Sequence[str]) -> list[str]:
    """The ids that `--op` names, of our operations or of `others` (a user's own kernels)."""
    known = {*(one.op_id for one in records()), *others}
    op_ids = [name for word in words("--op", op) for name in _ids_of(word, known)]
    unknown = [name for name in op_ids if name not in known]
    if unknown:
        legal = ", ".join(sorted({name_of(name) for name in known}))
        wrong_use(f"--op must be one of {legal}; got {', '.join(map(repr, unknown))}.")
    return op_ids


def _ids_of(word: str, known: Collection[str]) -> list[str]:
    """The ids that a word means: of an operation all that stand for it, older ones too; of anything else the word."""
    record = find(word)
    return [word] if record is None else [op_id for op_id in sorted(known) if record.answers_to(op_id)]


def _refuse_idle_folder(context: typer.Context, recorded: Path | None) -> None:
    """Exits where --cache-dir would change nothing; the environment variable of the same meaning may stay set."""
    source = context.get_parameter_source("cache_dir")
    if recorded is not None and source is not None and source.name == "COMMANDLINE":
        wrong_use("--recorded shows what that run chose, wherever it is stored; it does not go together with --cache-dir.")


def _entries(folder: Path, op: Sequence[str] | None, recorded: Path | None) -> list[Entry]:
    every = recorded_entries(recorded) if recorded is not None else [*stored_entries(folder), *shipped_entries()]
    return _named(every, _op_ids(op, [*operation_folders(folder), *(entry.op_id for entry in every)]))


def _named(entries: Sequence[Entry], op_ids: Sequence[str]) -> list[Entry]:
    """Those of the operations named; all where none is."""
    return [entry for entry in entries if not op_ids or entry.op_id in op_ids]


def _with_ids(entries: Sequence[Entry], ids: Sequence[str]) -> list[Entry]:
    chosen: list[Entry] = []
    for wanted in ids:
        if not wanted:  # every id begins with nothing
            wrong_use("an id was given with nothing in it; `ejkernel cache list --all` shows the ids.")
        found = [entry for entry in entries if entry.id.startswith(wanted.lower())]
        if not found:
            wrong_use(f"no entry's id begins with {wanted!r}; `ejkernel cache list --all` shows the ids.")
        chosen += [entry for entry in found if entry not in chosen]
    return chosen


def _text(file: Path) -> str:
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except OSError as problem:
        wrong_use(f"{file} cannot be read: {problem.strerror}.")
    except UnicodeDecodeError as problem:
        fail(f"{file} is not text ({problem}); nothing was imported. Export it again with `ejkernel cache export`.")
    try:
        exchange.parse(text)
    except ValueError as problem:
        why = str(problem).rstrip(".")
        fail(f"{file} is damaged or no export: {why}. Nothing was imported; export it again with `ejkernel cache export`.")
    return text


def _listing(entries: Sequence[Entry]) -> Any:
    """Two lines an entry, so that everything fits 80 columns."""
    made = table(["!operation, id", "shape", "!level", "configuration", "!>time, gain"])
    for entry in entries:
        sizes, _, rest = entry.shape().partition(" ")
        made.add_row(
            Text.assemble(f"{name_of(entry.op_id)}\n", (entry.id, "cyan")),
            f"{sizes}\n{rest}",
            Text(entry.level, "" if entry.here else "dim"),
            entry.config(),
            "-" if entry.seconds is None else f"{duration(entry.seconds)}\n{ratio(entry.gain)}",
        )
    return made


def _describe(console: Console, entry: Entry) -> None:
    console.print(Text.assemble((f"{entry.id}  {name_of(entry.op_id)}", "bold"), f"  level {entry.level}"))
    if entry.unreadable is not None:
        console.print(Text(f"unreadable: {entry.unreadable}", "yellow"))
        if entry.file is not None:
            console.print(f"{entry.file}: the next tuning replaces it; `ejkernel cache clear {entry.id}` removes it.")
        return
    facts = table(["!", ""])
    facts.show_header = False
    facts.add_row("configuration", entry.config())
    if entry.route is not None:
        facts.add_row("route", str(entry.route))
    for name, text in entry.arrays().items():
        facts.add_row(name, text)
    for name, text in entry.call.get("static", {}).items():
        facts.add_row(name, str(text))
    where = entry.call.get("environment", {})
    facts.add_row(
        "for",
        ", ".join(
            f"{where[name]}" if name == "device" else f"{name} {where[name]}"
            for name in where
            if name not in ("runtime", "backend")
        ),
    )
    if not entry.here:
        facts.add_row("", Text("not used here: another device or other versions", "yellow"))
    record = entry.record
    if "time" in record:
        facts.add_row(
            "measured", f"{record['time']}, {record.get('measured', '')}, in {duration(record.get('tuning_seconds'))}"
        )
    for name in ("note", "failed", "not_tuned", "shipped_for"):
        if name in record:
            facts.add_row(name.replace("_", " "), str(record[name]))
    console.print(facts)
    if record.get("candidates"):
        console.print(_candidates(entry))


def _candidates(entry: Entry) -> Any:
    made = table(["candidate", "!>time", "!>x chosen", "outcome"])
    best = entry.seconds
    ordered = sorted(entry.record["candidates"], key=lambda one: one.get("seconds", float("inf")))
    for one in ordered:
        as_entry = Entry(entry.key, entry.level, one["config"], {}, True)
        won = one["config"] == dict(entry.fields)
        heuristic = one["config"] == entry.record.get("heuristic")
        seconds = one.get("seconds")
        against = None if not seconds or not best else seconds / best
        noise = against is not None and against < 1
        notes = (("chosen", won), ("heuristic", heuristic), ("faster only within the noise", noise))
        outcome = one.get("reason") or ", ".join(word for word, is_so in notes if is_so)
        made.add_row(as_entry.config(), duration(seconds), ratio(against), Text(outcome, "bold green" if won else ""))
    return made
