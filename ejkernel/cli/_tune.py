"""`ejkernel tune`: measuring configurations ahead of the run, interruptible and resumable."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from ejkernel._device import backend_of, default_device
from ejkernel.cli import _options
from ejkernel.cli._entries import Entry, check_writable
from ejkernel.cli._measure import invocations
from ejkernel.cli._operations import (
    Operation,
    chosen_dtypes,
    chosen_gates,
    chosen_operations,
    chosen_platforms,
    legal_operations,
    load_modules,
    name_of,
    shape_of,
    words,
)
from ejkernel.cli._screen import (
    INTERRUPTED,
    count,
    duration,
    duration_in_words,
    fail,
    print_json,
    progress,
    ratio,
    screen,
    side,
    table,
    tell,
    wrong_use,
)
from ejkernel.ops.config.cache import ConfigCache
from ejkernel.ops.config.codec import to_fields
from ejkernel.ops.config.persistent import PersistentCache, cache_folder
from ejkernel.ops.config.policy import AutotunePolicy
from ejkernel.ops.config.selection import Choice, ConfigSelectorChain, Level
from ejkernel.ops.invocation import Invocation
from ejkernel.ops.tuner import Tuner
from ejkernel.testing.record import find

UNFINISHED = "time ran out before anything beside the heuristic was timed; give more --max-seconds"


@dataclasses.dataclass(frozen=True)
class Job:
    """A call to tune; `reason` says why it cannot be, where there is no call."""

    op_id: str
    label: str
    invocation: Invocation | None
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Done:
    """A job with what became of it: "tuned", "known" (measured before), "unfinished" (nothing but the heuristic was timed, and
    nothing is stored), "failed" or "skipped"."""

    job: Job
    status: str
    choice: Choice | None = None
    reason: str = ""

    @property
    def entry(self) -> Entry | None:
        """The choice as `cache show` has it."""
        if self.choice is None or self.job.invocation is None:
            return None
        return Entry(self.job.invocation.key, str(self.choice.level), to_fields(self.choice.config), self.choice.record, True)

    def stored(self, folder: Path) -> bool:
        """Whether the result lies in the cache now."""
        inv = self.job.invocation
        return inv is not None and PersistentCache(inv.kernel.op_id, folder).file(inv.key).is_file()


def tune(
    op: _options.Ops = None,
    shapes: _options.Shapes = None,
    file: Annotated[Path | None, typer.Option(metavar="FILE", help="Lines 'OPERATION SHAPE'; # starts a comment.")] = None,
    recorded: _options.Recorded = None,
    gates: _options.Gates = None,
    dtype: _options.Dtype = None,
    platform: Annotated[
        str | None, typer.Option(metavar="NAME", help="For calls that name this platform; left out: for calls that name none.")
    ] = None,
    max_seconds: Annotated[float, typer.Option(metavar="S", help="The longest that one call may take.")] = 60.0,
    iters: Annotated[int, typer.Option(metavar="N", help="Samples of each candidate.")] = 10,
    forward_only: Annotated[bool, typer.Option("--forward-only", help="Neither time nor compare gradients.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Measure again what was measured before.")] = False,
    load: _options.Load = None,
    cache_dir: _options.CacheDir = None,
    as_json: _options.Json = False,
) -> None:
    """Measure configurations ahead of the run and store the best.

    Every result is stored as soon as it is there: Ctrl-C loses nothing but the call being measured, and the same command goes
    on where it stopped. What was measured before is not measured again without --force. Lengths T share a result with all
    lengths up to the same power of two. Without --shapes, --file or --recorded it takes the shapes that `bench` measures.
    Exits with 1 when a call could not be tuned, 130 when interrupted.

    \b
    Examples:
      ejkernel tune --op gla_attention
      ejkernel tune --op gla_attention --shapes 2x2048x4x64x64:gk
      ejkernel tune --op gla_attention --dtype bfloat16 --shapes 8x4096x16x128
      ejkernel tune --file shapes.txt
      ejkernel tune --recorded run.json
    """
    load_modules(load)
    tuner = _tuner(iters, max_seconds)
    folder = _folder(cache_dir)
    jobs = _jobs(op, shapes, file, recorded, gates, dtype, platform)
    chain = ConfigSelectorChain(
        cache=ConfigCache(),
        policy=AutotunePolicy(validate_backward=not forward_only),
        tuner=tuner,
        persistent=lambda op_id, config_cls=None: PersistentCache(op_id, folder, config_cls),
    )
    done, interrupted = _run(jobs, chain, tuner, force, folder)
    if as_json:
        print_json(_as_json(done, jobs, folder, interrupted))
    else:
        _show(done, folder)
    if interrupted:
        left = len(jobs) - len(done)
        tell(side(), f"interrupted: {left} of {len(jobs)} calls left. The same command goes on from here.")
        raise typer.Exit(INTERRUPTED)
    raise typer.Exit(1 if any(one.status in ("failed", "skipped", "unfinished") for one in done) else 0)


def _tuner(iters: int, max_seconds: float) -> Tuner:
    try:
        return Tuner(iters=iters, max_seconds=max_seconds)
    except ValueError as problem:
        wrong_use(f"--{str(problem).replace('max_seconds', 'max-seconds')}")


def _folder(cache_dir: Path | None) -> Path:
    folder = cache_folder() if cache_dir is None else cache_dir.expanduser()
    check_writable(folder, "nothing would be kept")
    return folder


def _jobs(
    op: Sequence[str] | None,
    shapes: Sequence[str] | None,
    file: Path | None,
    recorded: Path | None,
    gates: str | None,
    dtype: str | None,
    platform: str | None,
) -> list[Job]:
    """Every distinct call that is asked for, in order."""
    where = next((name for name in chosen_platforms(None if platform is None else [platform]) if name != "auto"), None)
    operations = chosen_operations(op)
    named, kind = chosen_gates(gates, operations), (chosen_dtypes(None if dtype is None else [dtype]) or ["float32"])[0]
    _refuse_idle_options(op, shapes, file, recorded, {"--gates": gates, "--dtype": dtype, "--platform": platform})
    jobs: list[Job] = []
    texts = words("--shapes", shapes)
    if texts:
        if not op and len(operations) > 1:
            wrong_use("--shapes needs --op: which operation is called with these shapes?")
        for one in operations:
            jobs += [job for text in texts for job in _job(one, text, named, kind, where)]
    if file is not None:
        jobs += _from_file(file, named, kind, where)
    if recorded is not None:
        jobs += _from_record(recorded, [one.op_id for one in operations] if op else None)
    if not texts and file is None and recorded is None:
        backend = backend_of(default_device())
        jobs += [job for one in operations for text in one.usual_shapes(backend) for job in _job(one, text, named, kind, where)]
    return list({(job.label, job.reason) if job.invocation is None else job.invocation.key: job for job in jobs}.values())


def _refuse_idle_options(op: Any, shapes: Any, file: Any, recorded: Any, of_shapes: dict[str, str | None]) -> None:
    """Exits where an option would change nothing."""
    if file is not None and op and not shapes and recorded is None:
        wrong_use("--op does not go together with --file, whose lines name their operations.")
    idle = [name for name, value in of_shapes.items() if value]
    if recorded is not None and idle and file is None and not shapes:
        wrong_use(f"--recorded tunes the calls as they were made; it does not go together with {', '.join(idle)}.")


def _job(op: Operation, text: str, gates: tuple[str, ...] | None, dtype: str, platform: str | None) -> list[Job]:
    shape = shape_of(op, text, gates, dtype)
    try:
        return [Job(op.op_id, str(shape).replace(":", " "), inv) for inv in invocations(op, shape, platform)]
    except ValueError as problem:  # a platform that cannot run here
        fail(str(problem))


def _from_file(file: Path, gates: tuple[str, ...] | None, dtype: str, platform: str | None) -> list[Job]:
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except OSError as problem:
        wrong_use(f"{file} cannot be read: {problem.strerror}.")
    except UnicodeDecodeError as problem:
        wrong_use(f"{file} is not text: {problem}.")
    jobs: list[Job] = []
    for number, line in enumerate(lines, 1):
        parts = line.partition("#")[0].split()
        if not parts:
            continue
        op = find(parts[0])
        if len(parts) != 2 or op is None:
            legal = f"expected 'OPERATION SHAPE' with an operation of {legal_operations()}"
            wrong_use(f"{file}, line {number}: {legal}; got {line.strip()!r}.")
        jobs += _job(op, parts[1], gates, dtype, platform)
    return jobs


def _from_record(file: Path, op_ids: Sequence[str] | None) -> list[Job]:
    """The calls of a recorded run. Those that ran with an explicit configuration are left alone, as the program does."""
    from ejkernel.cli._entries import recorded_choices
    from ejkernel.ops.recording import NotRecordable, invocation

    jobs: list[Job] = []
    for choice in recorded_choices(file):
        entry = Entry(choice["key"], choice["level"], choice["config"], choice["record"], True)
        if choice["level"] in (Level.EXPLICIT, Level.OVERLAY) or (op_ids is not None and entry.op_id not in op_ids):
            continue
        try:
            jobs.append(Job(entry.op_id, entry.shape(), invocation(choice)))
        except NotRecordable as why:
            jobs.append(Job(entry.op_id, entry.shape(), None, str(why)))
    return jobs


def _run(jobs: Sequence[Job], chain: ConfigSelectorChain, tuner: Tuner, force: bool, folder: Path) -> tuple[list[Done], bool]:
    """Everything that was done, and whether it was interrupted before the end."""
    done: list[Done] = []
    longest = duration_in_words(len(jobs) * tuner.max_seconds)
    tell(side(), f"{count(len(jobs), 'call')}, each at most {tuner.max_seconds:g} s: {longest} at most")
    with progress("tuning:", len(jobs), remaining=True) as step:
        for job in jobs:
            label = f"{name_of(job.op_id)} {job.label}"
            step(label, 0)
            tuner.progress = lambda share, what, label=label: step(f"{what}, {label}", 0, share)
            try:
                done.append(_tuned(job, chain, force, folder))
            except KeyboardInterrupt:
                return done, True
            step(label)
    return done, False


def _tuned(job: Job, chain: ConfigSelectorChain, force: bool, folder: Path) -> Done:
    if job.invocation is None:
        return Done(job, "skipped", reason=job.reason)
    choice = chain.tune(job.invocation, again=force)
    if choice.level is Level.HEURISTICS:
        return Done(job, "failed", choice, str(choice.record.get("failed", "it could not be measured")))
    done = Done(job, "tuned" if choice.level is Level.AUTOTUNE else "known", choice)
    if done.status == "tuned" and not done.stored(folder):
        return dataclasses.replace(done, status="unfinished", reason=UNFINISHED)
    return done


def _as_json(done: Sequence[Done], jobs: Sequence[Job], folder: Path, interrupted: bool) -> dict[str, Any]:
    def one(each: Done) -> dict[str, Any]:
        entry = each.entry
        shown = {} if entry is None else entry.as_json()
        return {
            "operation": name_of(each.job.op_id),
            "shape": each.job.label,
            "status": each.status,
            "reason": each.reason,
        } | shown

    return {
        "folder": str(folder),
        "interrupted": interrupted,
        "left": len(jobs) - len(done),
        "calls": [one(each) for each in done],
    }


def _show(done: Sequence[Done], folder: Path) -> None:
    console = screen()
    made = table(["!operation", "shape", "!result", "configuration", "!>time, gain"])
    styles = {"tuned": "green", "known": "", "unfinished": "yellow", "failed": "bold red", "skipped": "yellow"}
    for one in done:
        entry, sizes = one.entry, one.job.label.replace(" ", "\n", 1)
        status = Text(one.status, styles[one.status])
        if entry is None or one.status == "failed":
            made.add_row(name_of(one.job.op_id), sizes, status, one.reason)
        else:
            times = f"{duration(entry.seconds)}\n{ratio(entry.gain)}"
            made.add_row(name_of(entry.op_id), sizes, status, entry.config(), times)
    if done:
        console.print(made)
        console.print("gain: the untuned configuration's time over this one's; known: measured before (--force measures again)")
    stored = sum(one.stored(folder) for one in done)
    if stored:
        where = f"{count(stored, 'call')} stored in {folder}"
        tell(console, f"{where}; `ejkernel cache show` has the losers and reasons")
    if stored < len(done) or not done:
        lost = "nothing was tuned" if not done else f"{len(done) - stored} of {count(len(done), 'call')} not stored"
        slow = any(one.status == "unfinished" for one in done)
        console.print(f"{lost}{f': {UNFINISHED}' if slow else ''}")
