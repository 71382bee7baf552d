"""The figures that the README compares with are those of the newest tables in benchmarks/RESULTS.md."""

from __future__ import annotations

import re

import pytest

from tests.documentation.pages import ROOT

README = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")


def rows(section: str) -> list[list[str]]:
    """The cells of the tables' rows under a heading."""
    text = RESULTS.partition(f"## {section}\n")[2].partition("\n## ")[0]
    assert text, f"RESULTS.md has no section {section!r}"
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


def linear(*gates: str) -> list[float]:
    """Our time over flash-linear-attention's, forward and with the gradient."""
    found = [row for row in rows("Linear attention on an H200: the triton platform") if len(row) == 10 and row[1] in gates]
    return [float(row[column].split()[0]) for row in found for column in (4, 7)]


def delta(column: int, gate: str = "", direction: slice = slice(None)) -> list[float]:
    """Our time over the other side's."""
    found = [row for row in rows("The delta rule on an H200: the triton platform") if len(row) == 7 and row[1].startswith(gate)]
    pairs = [re.findall(r"\d\.\d\d", row[column]) for row in found]
    return [float(number) for pair in pairs for number in pair[direction]]


FORWARD, WITH_GRADIENT = slice(0, 1), slice(1, 2)
FLA = "flash-linear-attention 0.6.0, gates per key channel"
PER_HEAD = "the same, one gate per head or none"
DELTA = "the same, the delta rule"
JLA = "jax-linear-attention 0.1.0, the delta rule"


@pytest.mark.parametrize(
    ("line", "ratios"),
    [
        (FLA, linear("gk")),
        (PER_HEAD, linear("g", "g_gamma", "none")),
        (DELTA, delta(4, "per ")),
        (JLA, delta(6, "per key channel")),
        (JLA, delta(6, "per head", FORWARD)),
        (JLA, delta(6, "per head", WITH_GRADIENT)),
    ],
)
def test_ranges_of_the_readme_are_those_of_the_results(line, ratios):
    shown = next(text for text in README.splitlines() if text.startswith(f"| {line} "))
    assert len(ratios) >= 3
    assert f"{min(ratios):.2f} to {max(ratios):.2f}" in shown
