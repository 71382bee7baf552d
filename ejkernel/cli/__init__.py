"""The command `ejkernel`: doctor, verify, bench, tune, cache.

The command needs the extra `cli` (typer and rich). This module imports neither, so that it can say so.
"""

from __future__ import annotations

import importlib.util
import sys

NEEDED = ("typer", "rich")


def main() -> None:
    """Runs the command with the process's arguments and exits: 0 good, 1 found a failure, 2 wrong usage, 130 interrupted."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(
            f"ejkernel: the command line needs {' and '.join(missing)}, which the library itself does not.\n"
            f'Install the extra from the checkout of this library: pip install ".[cli]", or ".[cli,plot]" for pictures too.',
            file=sys.stderr,
        )
        raise SystemExit(2)
    from ejkernel.cli._app import run

    run()
