"""Python processes of their own, where Triton compiles instead of interpreting, or JAX has other devices."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]


def outside(*arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """What a Python process on the CPU prints; without the interpreter unless `environment` asks for it."""
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = {**inherited, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu", **(environment or {})}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=variables, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
