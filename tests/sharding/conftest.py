"""Programs on simulated devices run once, however many processes share the tests."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture(scope="session")
def once(tmp_path_factory) -> Callable[[str, Callable[[], Any]], Any]:
    """`once(name, make)`: what `make` gives, as JSON; the first process that asks runs it, the others wait."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent

    def found(name: str, make: Callable[[], Any]) -> Any:
        file = folder / f"{name}.json"
        with open(folder / f"{name}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not file.exists():
                file.write_text(json.dumps(make()))
            return json.loads(file.read_text())

    return found
