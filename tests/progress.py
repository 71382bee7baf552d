"""Every test's outcome in a file as soon as it is known, and a run that goes on where the last one was stopped:

    python -m pytest -p tests.progress --progress results.jsonl -m gpu -n 8
    python -m tests.progress results.jsonl          what the file says: how many passed, which failed or never ended, and why

What has passed on the same code, device and versions is left out. What failed, or had begun and not ended, comes last: it may
have been what stopped the run. Where processes share the tests, only the one that directs them writes.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Generator, Iterable
from typing import Any

import pytest

from ejkernel.testing.results import Line, Results, here, read

BEGUN, PASSED, SKIPPED, FAILED = "begun", "passed", "skipped", "failed"
BEFORE = "tests.progress: outcomes"  # what the processes that share the tests are told of earlier runs
_before = pytest.StashKey[dict[str, str]]()


def outcomes(lines: Iterable[Line]) -> dict[str, str]:
    """The last outcome of every test."""
    return {line["test"]: line["outcome"] for line in lines}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--progress", metavar="FILE", help="outcomes go there, and what has passed by it is left out")


@pytest.hookimpl(trylast=True)
def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        config.stash[_before] = config.workerinput.get(BEFORE, {})
    elif (path := config.getoption("--progress")) is not None:
        results = Results(path, here("tests", "conftest.py"))
        config.stash[_before] = outcomes(results.lines)
        config.pluginmanager.register(Recorder(config, results))


@pytest.hookimpl(trylast=True)  # of what other options have left
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    known = config.stash.get(_before, {})
    passed = [item for item in items if known.get(item.nodeid) == PASSED]
    if passed:
        config.hook.pytest_deselected(items=passed)
    unsure = lambda item: known.get(item.nodeid) in (FAILED, BEGUN)
    items[:] = sorted((item for item in items if known.get(item.nodeid) != PASSED), key=unsure)


class Recorder:
    """Writes outcomes, in the process that directs the others."""

    def __init__(self, config: pytest.Config, results: Results):
        self.config, self.results = config, results

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        # Not read from the file by each process: one that replaces another must find the same tests.
        node.workerinput[BEFORE] = self.config.stash[_before]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.results.add({"test": nodeid}, outcome=BEGUN)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when in ("setup", "teardown") and report.passed:
            return
        about = {} if report.passed else {"text": report.longreprtext if report.failed else _reason(report)}
        if report.failed and report.capstdout:
            about["printed"] = report.capstdout[-4000:]
        self.results.add({"test": report.nodeid}, outcome=report.outcome, seconds=round(report.duration, 2), **about)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, Any, Any]:
        yield
        if session.exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED and PASSED in self.config.stash[_before].values():
            session.exitstatus = pytest.ExitCode.OK

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        terminalreporter.section(f"{self.results.path}, this code on this device")
        for line in summary(self.results.lines):
            terminalreporter.line(line)


def _reason(report: pytest.TestReport) -> str:
    return report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longreprtext


def summary(lines: Iterable[Line]) -> list[str]:
    """How many tests ended how, and the names of those that did not pass, with the last line of why."""
    last = {line["test"]: line for line in lines}
    counts = collections.Counter(line["outcome"] for line in last.values())
    text = [", ".join(f"{counts[name]} {name}" for name in (PASSED, SKIPPED, FAILED, BEGUN) if counts[name]) or "no tests"]
    for outcome, what in ((FAILED, FAILED), (BEGUN, "never ended")):
        for name, line in last.items():
            if line["outcome"] == outcome:
                why = (line.get("text", "").strip().splitlines() or [""])[-1]
                text.append(f"{what}: {name}" + f"  {why[:200]}" * bool(why))
    return text


def main(path: str) -> int:
    """Prints what the file says of the code of its last line; 1 where a test failed or never ended."""
    lines = read(path)
    about = lambda line: tuple(line.get(name) for name in ("device", "code"))
    lines = [line for line in lines if about(line) == about(lines[-1])]
    print(*summary(lines), sep="\n")
    return int(not {FAILED, BEGUN}.isdisjoint(outcomes(lines).values()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
