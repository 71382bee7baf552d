"""Runs the programs that `tests.triton.sanitized` has written, without Triton: see there."""

from __future__ import annotations

import pickle
import sys
import time
from typing import Any

import jax
import jax.export
import numpy as np


def read(path: str) -> dict[str, Any]:
    """What `tests.triton.sanitized` has written: the programs, and what they are about."""
    with open(path, "rb") as file:
        return pickle.load(file)


def main() -> None:
    begin = time.monotonic()
    programs = read(sys.argv[1])["programs"]
    for name, program, arguments in programs:
        results = jax.export.deserialize(bytearray(program)).call(*arguments)
        if not all(np.isfinite(np.asarray(x, np.float32)).all() for x in results):
            raise SystemExit(f"{name}: not finite")
        print(f"{name}: {time.monotonic() - begin:.1f} s", flush=True)
    print(f"{len(programs)} programs")


if __name__ == "__main__":
    main()
