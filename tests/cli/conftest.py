"""The command as a user runs it: `run("cache", "list")` gives its exit code and what it printed, at 80 columns."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from ejkernel.ops import PersistentCache, notices, reporting

KEY = '{"arrays":{"problem.query":"float32[1,~64,2,16]","problem.value":"float32[1,~64,2,16]"},"op":"%s","n":%d}'


class Result:
    """What a command did."""

    def __init__(self, result: Any):
        self.code, self.out, self.err = result.exit_code, result.stdout, result.stderr
        self.words = " ".join((self.out + " " + self.err).split())  # without line breaks

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture
def run(monkeypatch) -> Callable[..., Result]:
    from typer.testing import CliRunner

    from ejkernel.cli._app import app

    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")

    def call(*arguments: Any, code: int | None = None, **options: Any) -> Result:
        result = CliRunner().invoke(app, [str(a) for a in arguments], prog_name="ejkernel", **options)
        if result.exception is not None and not isinstance(result.exception, SystemExit):
            raise result.exception
        found = Result(result)
        assert code is None or found.code == code, (found.code, found.out, found.err)
        if "--json" not in arguments and "export" not in arguments:
            lines = [line for line in found.out.splitlines() if "/" not in line]  # paths are not broken
            assert max(map(len, lines), default=0) <= 80, f"wider than the terminal:\n{found.out}"
        return found

    return call


@pytest.fixture(autouse=True)
def _alone():
    notices.forget_warnings()
    reporting.clear_report()


@pytest.fixture
def entry(tmp_path) -> Callable[..., str]:
    """Stores an entry in the test's cache and gives its key."""

    def put(op_id: str = "gla", number: int = 1, time: str = "2026-01-01T00:00:00+00:00") -> str:
        key = KEY % (op_id, number)
        slow = {"config": {"block_q": 16}, "seconds": 4e-3}
        bad = {"config": {"block_q": 99}, "reason": "out of memory: it was too large"}
        won = {"config": {"block_q": 64}, "seconds": 2e-3}
        record = {"seconds": 2e-3, "heuristic_seconds": 4e-3, "heuristic": {"block_q": 16}, "time": time}
        PersistentCache(op_id).put(key, {"block_q": 64}, {**record, "candidates": [slow, bad, won]})
        return key

    return put
