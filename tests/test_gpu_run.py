"""What benchmarks/GPU_RUN.md prints for a GPU whose minutes are few: commands that exist, choose rows, and end in time."""

from __future__ import annotations

import dataclasses
import importlib
import re
import shlex
import sys

import pytest

from ejkernel.testing import jax_linear
from ejkernel.testing.bench_run import Run, asked_for
from tests.documentation.pages import ROOT, blocks

PAGE = ROOT / "benchmarks/GPU_RUN.md"
WRONG_USE = 2  # argparse's
LONGEST, IN_ALL = 9 * 60, 26 * 60  # seconds


@dataclasses.dataclass
class Command:
    """A line of the page that has its minutes: what runs, how long it may, and the run that it belongs to."""

    module: str
    arguments: list[str]
    limit: int
    run: int

    def __str__(self) -> str:
        return " ".join([self.module, *self.arguments])

    def of(self, option: str) -> list[str]:
        """What follows an option."""
        if option not in self.arguments:
            return []
        rest = self.arguments[self.arguments.index(option) + 1 :]
        return rest[: next((i for i, word in enumerate(rest) if word.startswith("--")), len(rest))]


def commands() -> list[Command]:
    found = []
    for run, block in enumerate(blocks(PAGE)):
        for line in block.code.replace("\\\n", " ").splitlines():
            if limit := re.match(r"timeout (\d+) (.*)", line):
                words = shlex.split(limit[2], comments=True)
                at = words.index("-m") + 1 if "-m" in words else 0
                found.append(Command(words[at], words[at + 1 :], int(limit[1]), run))
    return found


BENCHMARKS = [command for command in commands() if command.module.startswith("benchmarks.")]


def test_runs_end_in_time():
    limits: dict[int, int] = {}
    for command in commands():
        limits[command.run] = limits.get(command.run, 0) + command.limit
        within = command.of("--seconds-in-all")
        assert command not in BENCHMARKS or int(within[0]) < command.limit, "a benchmark ends by itself, before it is ended"
    assert max(limits.values()) <= LONGEST
    assert sum(limits.values()) <= IN_ALL


@pytest.mark.parametrize("command", BENCHMARKS, ids=str)
def test_a_benchmark_measures_what_it_is_asked_for(command, monkeypatch):
    """Nothing is measured: each part is noted instead. Every side has parts, and every text of --rows names one."""
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # which a benchmark sets where it is not
    module = importlib.import_module(command.module)
    monkeypatch.setattr(sys, "argv", [command.module, *command.arguments[: command.arguments.index("--json")],
                                      *command.arguments[command.arguments.index("--json") + 2 :]])  # fmt: skip
    if command.module == "benchmarks.tune_gpu":
        _, options = module.options_given()
        names = [f"{label}: {name}" for label in options.of for name in module.FAMILIES[label].calls()]
        chosen, sides = [name for name in names if asked_for(options.rows, name)], {"triton"}
    else:
        chosen, sides = parts(module, monkeypatch)
    assert chosen
    assert sides == set(command.of("--sides") or sides)
    for text in command.of("--rows"):
        assert any(text in name for name in chosen), text


def parts(module, monkeypatch):
    """(names of rows that are asked for, sides that are to be measured)."""
    chosen, sides = list[str](), set[str]()

    def asks_for(run, name):
        if found := asked_for(run.rows, name):
            chosen.append(name)
        return found

    monkeypatch.setattr(Run, "asks_for", asks_for)
    monkeypatch.setattr(Run, "part", lambda run, side, measure, **row: sides.add(side))
    monkeypatch.setattr(jax_linear, "missing", lambda: None)
    for name, nothing in (("MISSING", {}), ("tune_on_all_cores", lambda: None)):
        if hasattr(module, name):
            monkeypatch.setattr(module, name, nothing)
    if hasattr(module, "_candidates"):  # those of the GPU
        monkeypatch.setattr(module, "_candidates", lambda kind: [module.GatedDeltaRuleConfig()])
    try:
        module.main()
    except SystemExit as end:
        if end.code == WRONG_USE:
            raise
    return chosen, sides
