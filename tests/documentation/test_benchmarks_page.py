"""The ranges that docs/benchmarks.md gives are those of the tables in benchmarks/RESULTS.md."""

from __future__ import annotations

import re

import pytest

from tests.documentation.pages import ROOT, table_rows


def span(values: list[float]) -> str:
    least, most = f"{min(values):.2f}", f"{max(values):.2f}"
    return least if least == most else f"{least} to {most}"


def both(cells: list[str]) -> list[str]:
    """Ranges of cells of two numbers, forward and forward+backward."""
    numbers = [[float(number) for number in re.findall(r"\d+\.\d+", cell)] for cell in cells]
    return [span([pair[i] for pair in numbers]) for i in (0, 1)]


def linear(*gates: str) -> list[str]:
    table = table_rows("benchmarks/RESULTS.md", "Linear attention on an H200: the triton platform")
    return both([f"{row[4]} {row[7]}" for row in table if row[1] in gates and len(row) == 10])


def delta(gate: str, column: int) -> list[str]:
    table = table_rows("benchmarks/RESULTS.md", "The delta rule on an H200: the triton platform")
    return both([row[column] for row in table if row[1] == gate and len(row) == 7 and "/" in row[column]])


def softmax(option: str) -> list[str]:
    table = table_rows("benchmarks/RESULTS.md", "Softmax attention on an H200: the triton platform")
    ratio = re.compile(r"\((.*)\)")
    found = [[ratio.search(row[i]) for i in (2, 4)] for row in table if row[1].startswith(option)]
    return both([" ".join(match[1] for match in pair if match) for pair in found])


def convolution() -> list[str]:
    table = table_rows("benchmarks/RESULTS.md", "The short causal convolution on an H200")[1:]
    return both([f"{row[3]} {row[6]}" for row in table])


FLA, JLA = "flash-linear-attention", "jax-linear-attention"
SUMMARY = {
    ("gates per key channel", FLA, 0): lambda: linear("gk"),
    ("one gate per head", FLA, 0): lambda: linear("g"),
    ("constant decays, or none", FLA, 0): lambda: linear("g_gamma", "none"),
    ("gates per key and value channel", FLA, 0): lambda: linear("gk+gv"),
    ("one gate per head", FLA, 1): lambda: delta("per head", 4),
    ("one gate per head", JLA, 0): lambda: delta("per head", 6),
    ("gates per key channel", FLA, 1): lambda: delta("per key channel", 4),
    ("gates per key channel", JLA, 0): lambda: delta("per key channel", 6),
    ("sinks, by Triton", "cuDNN's plain call", 0): lambda: softmax("sinks"),
    ("soft cap, by Triton", "cuDNN's plain call", 0): lambda: softmax("soft cap"),
    ("bias, by Triton", "cuDNN's plain call", 0): lambda: softmax("bias"),
    ("mask, by Triton", "cuDNN's plain call", 0): lambda: softmax("mask"),
    ("`causal_conv1d`", None, 0): convolution,
}


@pytest.mark.parametrize("line", SUMMARY, ids=str)
def test_the_page_gives_the_ranges_of_the_log(line):
    label, rival, which = line  # `which`: the delta rule's table has lines of the same names after linear attention's
    table = table_rows("docs/benchmarks.md", "On an H200")
    found = [row for row in table if row[0] == label and rival in (None, row[1])]
    assert found[which][-2:] == SUMMARY[line]()


def test_bold_is_what_is_slower():
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    tables = re.findall(r"^\|[^\n]* \| beside \|[^\n]*\n(?:\|[^\n]*\n)+", text, re.MULTILINE)
    assert len(tables) == 4
    for table in tables:
        for row in table.splitlines()[2:]:
            for cell in row.strip("|").split("|")[2:]:
                slower = any(float(number) > 1 for number in re.findall(r"\d+\.\d+", cell))
                assert slower == ("**" in cell), row
