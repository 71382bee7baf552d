"""The commands, put together."""

from __future__ import annotations

import errno
import os
import sys
from typing import Annotated

import typer

from ejkernel._version import __version__
from ejkernel.cli import _cache, _screen
from ejkernel.cli._bench import bench
from ejkernel.cli._doctor import doctor
from ejkernel.cli._tune import tune
from ejkernel.cli._verify import verify
from ejkernel.ops.worker import left_behind

_FULL = (errno.ENOSPC, errno.EDQUOT)
app = typer.Typer(
    name="ejkernel",
    help="Attention kernels for JAX: what runs on this machine, whether it is right, how fast it is, and tuning it.",
    epilog="Exit codes: 0 good, 1 found a failure, 2 wrong usage, 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(doctor)
app.command()(verify)
app.command()(bench)
app.command()(tune)
app.add_typer(_cache.app, name="cache")


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ejkernel {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    pass


def _run_or_say_why_not() -> None:
    try:
        app(prog_name="ejkernel")
    except RuntimeError as problem:
        if "initialize backend" not in str(problem):  # JAX has no class of its own for it
            raise
        try:
            _screen.fail(f"JAX cannot use its device: {str(problem).splitlines()[0]}")
        except typer.Exit as end:  # nothing is left that would turn it into an exit
            raise SystemExit(end.exit_code) from None
    except OSError as problem:
        if problem.errno not in _FULL:
            raise
        # What Python still holds for standard output would fail once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        try:
            _screen.fail(f"the output cannot be written: {problem.strerror}.")
        except typer.Exit as end:
            raise SystemExit(end.exit_code) from None


def run() -> None:
    """The entry point of the command."""
    _screen.show_warnings()
    try:
        _run_or_say_why_not()
    except SystemExit as end:
        if not left_behind():
            raise
        # A candidate may compile on after an interrupt or its time; ending Python under it would abort the process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code if isinstance(end.code, int) else 0 if end.code is None else 1)
