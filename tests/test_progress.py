"""Outcomes of tests are in a file when they are known, whatever ends the run, and the next run goes on from there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ejkernel.testing import results
from ejkernel.testing.results import Results, code, read
from tests.progress import main, outcomes, summary

ROOT = Path(__file__).parents[1]
SUITE = """
import os, signal
import pytest

def test_first(): pass

@pytest.mark.parametrize("n", range(6))
def test_many(n): pass

def test_refused(): pytest.skip("refused: no such device")

def test_wrong():
    print("dgk 6.6e-3")
    assert not "WRONG" in os.environ, "dgk is wrong"

def test_deadly():
    if "DEADLY" in os.environ: os.kill(os.getpid(), signal.SIGKILL)

@pytest.fixture
def closing():
    yield
    assert not "WRONG" in os.environ, "left something behind"

def test_last(closing): pass
"""
TESTS = 11


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """Runs the suite with some of its faults; gives the exit status, what is printed, and the file's new lines."""
    (tmp_path / "test_suite.py").write_text(SUITE)
    file = tmp_path / "out" / "results.jsonl"

    def run(*options: str, faults: tuple[str, ...] = ()):
        before = len(read(file)) if file.exists() else 0
        environment = {**os.environ, **dict.fromkeys(faults, "1"), "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-p", "tests.progress", "--progress", str(file), "-p", "no:cacheprovider",
             "-c", os.devnull, "--rootdir", str(tmp_path), str(tmp_path), *options],
            capture_output=True, text=True, env=environment, cwd=tmp_path, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr, read(file)[before:]

    return run


def begun(lines) -> list[str]:
    return [line["test"].rpartition("::")[2] for line in lines if line["outcome"] == "begun"]


def test_a_run_that_is_killed_loses_nothing_and_the_next_goes_on(suite):
    status, _, lines = suite(faults=("DEADLY", "WRONG"))
    assert status == -signal.SIGKILL
    found = outcomes(lines)
    assert [list(found.values()).count(x) for x in ("passed", "skipped", "failed", "begun")] == [7, 1, 1, 1]
    (wrong,) = [line for line in lines if line["outcome"] == "failed"]
    assert "dgk is wrong" in wrong["text"]
    assert "dgk 6.6e-3" in wrong["printed"]
    assert wrong["test"] == "test_suite.py::test_wrong"

    status, printed, lines = suite()
    assert status == 0
    assert begun(lines) == ["test_refused", "test_last", "test_wrong", "test_deadly"]  # what was not run first
    assert "7 deselected" in printed
    assert f"{TESTS - 1} passed, 1 skipped" in printed

    status, _, lines = suite("-k", "not refused")
    assert (status, lines) == (0, [])  # nothing is left, which is no failure


def test_a_process_that_dies_costs_its_test_alone(suite):
    pytest.importorskip("xdist")
    status, printed, lines = suite("-n", "2", "--dist", "worksteal", faults=("DEADLY", "WRONG"))
    found = {name.rpartition("::")[2]: outcome for name, outcome in outcomes(lines).items()}
    assert status == 1
    assert len(found) == TESTS
    assert {name for name, outcome in found.items() if outcome == "failed"} == {"test_wrong", "test_deadly", "test_last"}
    assert "failed: test_suite.py::test_last  " in printed  # by what it left behind
    assert "left something behind" in printed
    status, _, lines = suite("-n", "2", "--dist", "worksteal")
    assert status == 0
    assert set(begun(lines)) == {"test_refused", "test_wrong", "test_deadly", "test_last"}
    status, _, lines = suite("-n", "2", "-k", "not refused")
    assert (status, lines) == (0, [])


def test_the_file_says_what_failed_or_never_ended(tmp_path, capsys):
    file = tmp_path / "results.jsonl"
    old, new = (Results(file, {"code": name, "device": "GPU"}) for name in ("old", "new"))
    old.add({"test": "a"}, outcome="failed")
    for name, outcome in (("a", "begun"), ("a", "passed"), ("b", "begun"), ("c", "begun"), ("c", "failed")):
        new.add({"test": name}, outcome=outcome, text="E  assert 3 < 2\n\ntest_c.py:7: AssertionError" if name == "c" else "")
    assert main(str(file)) == 1
    assert capsys.readouterr().out.splitlines() == [
        "1 passed, 1 failed, 1 begun",
        "failed: c  test_c.py:7: AssertionError",
        "never ended: b",
    ]
    assert summary([]) == ["no tests"]


def test_results_of_other_code_are_not_known(tmp_path):
    file = tmp_path / "results.jsonl"
    Results(file, {"code": "old"}).add({"test": "a"}, outcome="passed")
    results = Results(file, {"code": "new"})
    assert results.lines == []
    results.add({"test": "a"}, outcome="failed")
    assert [line["code"] for line in read(file)] == ["old", "new"]


def test_a_line_that_was_cut_off_costs_itself_alone(tmp_path):
    file = tmp_path / "results.jsonl"
    Results(file, {}).add({"row": 1}, ms=2.0)
    file.write_bytes(file.read_bytes() + b'{"row": 2, "m')
    again = Results(file, {})
    assert again.of(row=2) is None
    again.add({"row": 3}, ms=4.0)
    assert [line["row"] for line in read(file)] == [1, 3]


def test_code_is_known_by_its_sources(tmp_path, monkeypatch):
    (tmp_path / "ejkernel").mkdir()
    (tmp_path / "tests").mkdir()
    monkeypatch.setattr(results, "ROOT", tmp_path)
    found = []
    for place, text in (("ejkernel/a.py", "1"), ("ejkernel/a.py", "2"), ("tests/b.py", "1"), ("other.py", "1")):
        (tmp_path / place).write_text(text)
        code.cache_clear()
        found.append(code("tests"))
    code.cache_clear()
    assert len(set(found)) == 3
    assert found[2] == found[3]
