"""Benchmarks go on where they were stopped, end in time, and keep what their rows have shown."""

from __future__ import annotations

import argparse
import functools
import itertools
import os

import pytest

from ejkernel.testing.bench_run import Run, by_row
from ejkernel.testing.results import here, read
from tests.triton.processes import outside


@pytest.fixture
def begin(tmp_path):
    """A run with options, by a clock that each reading takes a second forward; `begin.file` is where its figures are."""
    file = tmp_path / "out" / "rows.jsonl"

    def run(*options: str, clock=None, tiny: bool = False) -> Run:
        parser = argparse.ArgumentParser()
        Run.add_options(parser)
        given = parser.parse_args(["--json", str(file), *options])
        given.tiny = tiny
        return Run(given, clock or itertools.count().__next__)

    run.__dict__["file"] = file
    return run


def table(run: Run, measured: list[str], fails: tuple[str, ...] = ()) -> list:
    """Three rows on two sides; what is measured goes into the list."""

    def measure(name: str):
        measured.append(name)
        if name in fails:
            raise ValueError(f"no room for {name}\nmore about it")
        return {"ms": float(len(measured))}

    return [
        run.part(side, functools.partial(measure, f"{row} {side}"), row=row)
        for row in ("r1", "r2", "r3")
        if run.asks_for(row)
        for side in ("ours", "fla")
    ]


ALL = [f"{row} {side}" for row in ("r1", "r2", "r3") for side in ("ours", "fla")]


def test_what_is_measured_is_not_measured_again(begin):
    first, second = list[str](), list[str]()
    lines = table(begin(), first)
    assert first == ALL
    assert table(begin(), second) == lines
    assert second == []


def test_a_run_that_was_interrupted_goes_on(begin):
    first, second = list[str](), list[str]()

    class Killed(BaseException):
        pass

    def dies(run):
        measure = run.part

        def part(side, measured, **row):
            if len(first) == 3:
                raise Killed
            return measure(side, measured, **row)

        run.part = part
        return run

    with pytest.raises(Killed):
        table(dies(begin()), first)
    assert [line["row"] for line in read(begin.file)] == ["r1", "r1", "r2"]
    table(begin(), second)
    assert first + second == ALL


def test_a_run_ends_before_its_time(begin):
    """A part takes two seconds by the clock: one before it, one after."""
    measured = list[str]()
    with pytest.raises(SystemExit, match=r"not within 7 s: .*'r2', 'side': 'fla'.*goes on from there"):
        table(begin("--seconds-in-all", "7"), measured)
    assert measured == ALL[:3]
    table(begin("--seconds-in-all", "100"), measured)
    assert measured == ALL


def test_the_longest_part_of_a_side_says_whether_there_is_time(begin):
    clock = iter([0, 1, 2, 3, 33, 34, 35, 36]).__next__  # ours takes 1 s, fla 30
    measured = list[str]()
    with pytest.raises(SystemExit, match="'r2', 'side': 'fla'"):
        table(begin("--seconds-in-all", "60", clock=clock), measured)
    assert measured == ALL[:3]


def test_a_part_that_cannot_run_leaves_the_others_and_is_tried_again(begin, capsys):
    measured, again = list[str](), list[str]()
    lines = table(begin(), measured, fails=("r1 fla",))
    assert [line is None for line in lines] == [False, True, False, False, False, False]
    assert "fla leaves out r1: ValueError: no room for r1 fla\n" in capsys.readouterr().err
    assert read(begin.file)[1]["problem"] == "no room for r1 fla\nmore about it"
    assert "Traceback" in read(begin.file)[1]["traceback"]
    assert None not in table(begin(), again)
    assert again == ["r1 fla"]


def test_rows_are_chosen_by_their_names(begin):
    measured = list[str]()
    table(begin("--rows", "r1", "3"), measured)
    assert measured == ["r1 ours", "r1 fla", "r3 ours", "r3 fla"]


def test_other_options_are_other_figures(begin):
    plain, tiny = list[str](), list[str]()
    table(begin(), plain)
    table(begin(tiny=True), tiny)
    assert plain == tiny == ALL
    table(begin(), plain)
    assert plain == ALL


def test_tables_are_printed_again_from_a_file_of_another_machine(begin, capsys):
    first = table(begin(), [], fails=("r2 fla",))
    text = begin.file.read_text()
    begin.file.write_text(text.replace(f'"device": "{here()["device"]}"', '"device": "NVIDIA H200"'))
    measured = list[str]()
    shown = begin("--show")
    assert [line and line["ms"] for line in table(shown, measured)] == [line and line["ms"] for line in first]
    assert measured == []
    missing = {"fla": lambda: "not installed"}
    assert shown.runnable(["ours", "fla"], missing) == ["ours", "fla"]
    assert begin().runnable(["ours", "fla"], missing) == ["ours"]
    assert capsys.readouterr().err.endswith("fla is left out: not installed\n")
    with pytest.raises(SystemExit, match="has nothing of"):
        begin("--show", tiny=True)


def test_sides_of_a_row_come_together(begin):
    table(begin(), [], fails=("r2 fla",))
    rows = by_row(read(begin.file), "row")
    assert [(row["row"], *(row[side]["ms"] for side in ("ours", "fla") if side in row)) for row in rows] == [
        ("r1", 1, 2), ("r2", 3), ("r3", 5, 6),
    ]  # fmt: skip


@pytest.mark.slow
def test_a_benchmark_goes_on(tmp_path):
    file = tmp_path / "rows.jsonl"
    rows = (
        "-m",
        "benchmarks.linear_attention_gpu",
        "--tiny",
        "--ours-only",
        "--json",
        str(file),
        "--rows",
        "8x2048x16x128x128 none",
    )
    flags = {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "")}
    first = outside(*rows, environment=flags)
    assert "| 8x2048x16x128x128 | none |" in first
    begun = file.read_text()
    assert outside(*rows, environment=flags) == first
    assert file.read_text() == begun
