"""`ejkernel verify`: every implementation on this machine against float64."""

from __future__ import annotations

import difflib
import textwrap
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.text import Text

from ejkernel.cli import _checks, _options
from ejkernel.cli._checks import Check, Outcome
from ejkernel.cli._operations import (
    Operation,
    chosen_dtypes,
    chosen_operations,
    chosen_platforms,
    load_modules,
)
from ejkernel.cli._screen import INTERRUPTED, count, fail, print_json, progress, screen, side, small, table, wrong_use
from ejkernel.testing.record import Case, records

_SHOWN = 20  # failures that are listed; --json has all


def verify(
    op: _options.Ops = None,
    platform: _options.Platforms = None,
    dtype: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"Only cases in this dtype: {', '.join(_checks.dtypes_of(records()))}."),
    ] = None,
    case: Annotated[str, typer.Option(metavar="TEXT", help="Only cases whose name contains this.")] = "",
    candidates: Annotated[
        bool,
        typer.Option("--candidates", help="Every configuration that tuning may choose, not only the one that runs untuned."),
    ] = False,
    no_gradients: Annotated[bool, typer.Option("--no-gradients", help="Outputs only; compiles much faster.")] = False,
    fail_fast: Annotated[bool, typer.Option("--fail-fast", help="Stop at the first failure.")] = False,
    load: _options.Load = None,
    as_json: _options.Json = False,
) -> None:
    """Check every implementation here against the float64 reference.

    Each runs the shared cases of its operation's record: all gates and masks, packed, reversed, odd sizes, 16-bit dtypes;
    outputs and gradients. Errors are relative RMS. A case that an implementation refuses counts as refused, not as passed.
    Exits with 1 when a case fails or nothing could be verified.

    \b
    Examples:
      ejkernel verify
      ejkernel verify --op gla_attention --dtype bfloat16 --no-gradients
      ejkernel verify --load my_kernels --op recurrent_attention --platform pallas
    """
    load_modules(load)
    operations, platforms = chosen_operations(op), chosen_platforms(platform, auto=False)
    dtypes = chosen_dtypes(dtype, _checks.dtypes_of(operations))
    checks = _plan(operations, platforms, dtypes, case)
    absent = {one.name: one.unavailable(platforms) for one in operations}
    if not checks:
        if not _has_cases(operations, dtypes, case):
            wrong_use(_no_case(operations, case))
        reasons = "; ".join(f"{name} on {where}: {why}" for name, each in absent.items() for where, why in each.items())
        fail(f"nothing can be verified here. {reasons}.")
    outcomes, interrupted = _run(checks, not no_gradients, candidates, fail_fast)
    if as_json:
        print_json(_as_json(outcomes, absent))
    else:
        _show(outcomes, absent, stopped=fail_fast)
    if interrupted:
        side().print("interrupted: not every case was run")
        raise typer.Exit(INTERRUPTED)
    raise typer.Exit(0 if _good(outcomes) else 1)


def _plan(operations: Sequence[Operation], platforms: Sequence[str], dtypes: Sequence[str], text: str) -> list[Check]:
    return [
        Check(op, entry, case)
        for op in operations
        for entry in op.registry.list_implementations(op.op_id)
        if (not platforms or entry.platform in platforms) and op.registry.refusal(entry) is None
        for case in _cases(op, dtypes, text)
    ]


def _cases(op: Operation, dtypes: Sequence[str], text: str) -> list[Case]:
    """The shared cases of an operation that the options ask for."""
    return [case for case in op.cases() if text in case.name and (not dtypes or case.dtype in dtypes)]


def _has_cases(operations: Sequence[Operation], dtypes: Sequence[str], text: str) -> bool:
    return any(_cases(op, dtypes, text) for op in operations)


def _no_case(operations: Sequence[Operation], text: str) -> str:
    """That no case has this text in its name, with the names there are: the nearest first, at most as many as help."""
    names = list(dict.fromkeys(case.name for op in operations for case in op.cases()))
    near = difflib.get_close_matches(text, names, n=3, cutoff=0.5)
    listed = "\n".join(textwrap.wrap(", ".join(names), 76, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False))
    hint = f" Did you mean {', '.join(near)}?" if near else ""
    of = ", ".join(op.name for op in operations)
    return f"no shared case has {text!r} in its name and that dtype.{hint}\nCases of {of}:\n{listed}"


def _run(checks: Sequence[Check], gradients: bool, candidates: bool, fail_fast: bool) -> tuple[list[Outcome], bool]:
    """What was found, and whether it was interrupted before the end."""
    outcomes: list[Outcome] = []
    with progress("verifying", len(checks)) as step:
        for check in checks:
            step(f"{check.op.name} {check.entry.platform} {check.case}", 0)
            try:
                for outcome in _checks.run_check(check, gradients, candidates):
                    outcomes.append(outcome)
                    if fail_fast and outcome.status == "failed":
                        return outcomes, False
            except KeyboardInterrupt:
                return outcomes, True
            step("")
    return outcomes, False


def _grouped(outcomes: Sequence[Outcome]) -> dict[tuple[str, str, str], list[Outcome]]:
    groups: dict[tuple[str, str, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault(outcome.check.group, []).append(outcome)
    return groups


def _row(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What one line of the table says."""
    counts = Counter(outcome.status for outcome in outcomes)
    measured = [outcome for outcome in outcomes if outcome.errors]
    worst = max(measured, key=lambda outcome: outcome.closeness, default=None)
    name, platform, dtype = outcomes[0].check.group
    nearest = {  # to its limit
        kind: max((found for o in measured if (found := o.worst(values))), key=_checks.closeness, default=None)
        for kind, values in (("output", True), ("gradient", False))
    }
    return {
        "operation": name,
        "platform": platform,
        "dtype": dtype,
        **{status: counts[status] for status in ("passed", "refused", "failed")},
        **{f"{kind}_error": None if found is None else found.error for kind, found in nearest.items()},
        **{f"{kind}_limit": None if found is None else found.limit for kind, found in nearest.items()},
        "worst_case": None if worst is None else worst.check.case.name,
    }


def _good(outcomes: Sequence[Outcome]) -> bool:
    """Whether some case ran and none failed."""
    statuses = {outcome.status for outcome in outcomes}
    return "passed" in statuses and "failed" not in statuses


def _as_json(outcomes: Sequence[Outcome], absent: dict[str, dict[str, str]]) -> dict[str, Any]:
    def one(outcome: Outcome) -> dict[str, Any]:
        name, platform, dtype = outcome.check.group
        return {
            "operation": name,
            "platform": platform,
            "dtype": dtype,
            "case": outcome.check.case.name,
            "config": outcome.config,
            "status": outcome.status,
            "reason": outcome.reason,
            "errors": {name: {"error": entry.error, "limit": entry.limit} for name, entry in outcome.errors.items()},
        }

    return {
        "good": _good(outcomes),
        "summary": [_row(group) for group in _grouped(outcomes).values()],
        "cases": [one(outcome) for outcome in outcomes],
        "not_here": absent,
    }


def _show(outcomes: Sequence[Outcome], absent: dict[str, dict[str, str]], stopped: bool) -> None:
    console = screen()
    grouped = _grouped(outcomes)
    for number, here in enumerate(dict.fromkeys(group[:2] for group in grouped)):
        rows = [_row(group) for key, group in grouped.items() if key[:2] == here]
        console.print(_shown(rows, title=" on ".join(here), header=number == 0))
    _list_reasons(console, outcomes, absent)
    failures = [outcome for outcome in outcomes if outcome.status == "failed"]
    total = Counter(outcome.status for outcome in outcomes)
    counts = f"{total['passed']} passed, {total['refused']} refused, {total['failed']} failed"
    style = "bold red" if failures else "bold green"
    console.print(Text(counts + (" (stopped at the first failure)" if failures and stopped else ""), style))


def _shown(rows: Sequence[dict[str, Any]], title: str, header: bool) -> Any:
    """One line per dtype; all tables have the same columns, so only the first needs a header."""
    made = table(["!dtype", "!>pass", "!>refuse", "!>fail", "!>outputs", "!>gradients", "worst case"], title)
    made.show_header = header
    for row in rows:
        errors = [
            Text(small(row[f"{kind}_error"]), "red" if (row[f"{kind}_error"] or 0) > (row[f"{kind}_limit"] or 0) else "")
            for kind in ("output", "gradient")
        ]
        failed = Text(str(row["failed"]), "bold red" if row["failed"] else "green")
        made.add_row(row["dtype"], str(row["passed"]), str(row["refused"]), failed, *errors, row["worst_case"] or "-")
    return made


def _list_reasons(console: Any, outcomes: Sequence[Outcome], absent: dict[str, dict[str, str]]) -> None:
    failures = [outcome for outcome in outcomes if outcome.status == "failed"]
    for outcome in failures[:_SHOWN]:
        name, platform, _ = outcome.check.group
        config = f" with {outcome.config}" if outcome.config else ""
        where = f"{name} {platform} {outcome.check.case}{config}: "
        console.print(Text.assemble(("FAILED ", "bold red"), where, outcome.reason))
    if len(failures) > _SHOWN:
        console.print(f"... and {len(failures) - _SHOWN} more; --json lists all.")
    refused = Counter((*outcome.check.group[:2], outcome.reason) for outcome in outcomes if outcome.status == "refused")
    for (name, platform, reason), number in refused.items():
        console.print(Text.assemble(("refused ", "yellow"), f"{name} {platform}: {count(number, 'case')}: {reason}"))
    by_reason: dict[str, list[str]] = {}
    for name, each in absent.items():
        for where, why in each.items():
            by_reason.setdefault(f"{where}: {why}", []).append(name)
    for reason, names in by_reason.items():
        if "not written" not in reason:
            console.print(Text.assemble(("not here ", "yellow"), f"{reason} ({', '.join(names)})"))
