"""The figures that the README compares with are those of the newest tables in benchmarks/RESULTS.md."""

from __future__ import annotations

import re

import pytest

from tests.documentation.pages import ROOT, table_rows

README = (ROOT / "README.md").read_text(encoding="utf-8")


def rows(heading: str) -> list[list[str]]:
    return table_rows("benchmarks/RESULTS.md", heading)


def linear(*gates: str) -> list[float]:
    """Our time over flash-linear-attention's, forward and with the gradient."""
    found = [row for row in rows("Linear attention on an H200: the triton platform") if len(row) == 10 and row[1] in gates]
    return [float(row[column].split()[0]) for row in found for column in (4, 7)]


def delta(column: int, gate: str) -> list[float]:
    """Our time over the other side's."""
    found = [row for row in rows("The delta rule on an H200: the triton platform") if len(row) == 7 and row[1].startswith(gate)]
    return [float(number) for row in found for number in re.findall(r"\d\.\d\d", row[column])]


def linear_beside_jla(*columns: int) -> list[float]:
    """Our time over jax-linear-attention's, by columns of its table: 2 per key channel, 4 `g`, 6 `g_gamma`."""
    found = [row for row in rows("Linear attention on an H200: the triton platform") if len(row) == 7]
    return [float(number) for row in found for column in columns for number in re.findall(r"\d\.\d\d", row[column])]


def options_of_softmax() -> list[float]:
    """The time with an option over cuDNN's plain causal call: the ratios in brackets."""
    found = [row for row in rows("Softmax attention on an H200: the triton platform") if len(row) == 6 and row[1] != "none"]
    return [float(ratio) for row in found for cell in row[2:] for ratio in re.findall(r"\((\d\.\d\d)\)", cell)]


def beside_a_scan(section: str, row_length: int, *columns: int) -> list[float]:
    """Our time over the scan's, of gradients at T = 8192, from columns that say how many times faster it is."""
    found = [row for row in rows(section) if len(row) == row_length and "8192" in row and "forward+backward" in row]
    return [1 / float(row[column]) for row in found for column in columns]


def beside_jax_nn() -> list[float]:
    found = [row for row in rows("Softmax attention on a CPU") if re.fullmatch(r"T = \d+, forward(\+backward)?", row[0])]
    return [1 / float(number) for row in found for cell in row[1:] for number in re.findall(r"\d\.\d+", cell)]


FLA, JLA = "flash-linear-attention 0.6.0", "jax-linear-attention 0.1.0"
SCAN = "a `lax.scan` and its autodiff"
LINES = {
    f"linear attention, gates per key channel | {FLA}": linear("gk"),
    f"linear attention, one gate per head, constant or none | {FLA}": linear("g", "g_gamma", "none"),
    f"linear attention, gates per key channel | {JLA}": linear_beside_jla(2),
    f"linear attention, one gate per head, or constant | {JLA}": linear_beside_jla(4, 6),
    f"the delta rule | {FLA}": delta(4, "per "),
    f"the delta rule, gates per key channel | {JLA}": delta(6, "per key channel"),
    f"the delta rule, one gate per head | {JLA}": delta(6, "per head"),
    "softmax attention, causal, by cuDNN | cuDNN called directly": [
        float(row[4]) for row in rows("Softmax attention on an H200") if len(row) == 6 and row[1].startswith("forward")
    ],
    "softmax attention with sinks, soft cap, mask or bias, by Triton | cuDNN's plain causal call": options_of_softmax(),
    f"linear attention, gradient, T = 8192 | {SCAN}": beside_a_scan("Linear attention on a CPU", 10, 6, 9),
    f"the delta rule, gradient, T = 8192 | {SCAN}": beside_a_scan("The delta rule on a CPU", 8, 5),
    "softmax attention, causal | `jax.nn.dot_product_attention`": beside_jax_nn(),
}


@pytest.mark.parametrize("line", LINES)
def test_ranges_of_the_readme_are_those_of_the_results(line):
    ratios = LINES[line]
    shown = next(text for text in README.splitlines() if text.startswith(f"| {line} |"))
    assert len(ratios) >= 3
    assert f"**{min(ratios):.2f} to {max(ratios):.2f}**" in shown


def test_every_range_of_the_readme_is_held_to_the_results():
    shown = [text.rpartition(" | ")[0] for text in README.splitlines() if re.search(r"\| \*\*\d.* to .*\*\* \|$", text)]
    assert shown == [f"| {line}" for line in LINES]


def test_memory_of_the_gradient():
    most = max(
        (row for row in rows("The delta rule on a CPU") if len(row) == 8 and row[2] == "forward+backward"),
        key=lambda r: int(r[6]),
    )
    assert f"takes {most[7]} MB of memory, the scan's {most[6]} MB" in README


def test_the_start_page_gives_the_same_ranges():
    page = " ".join((ROOT / "docs" / "index.md").read_text(encoding="utf-8").split())
    ratios = linear("gk", "g", "g_gamma", "none", "gk+gv")
    assert f"takes {min(ratios):.2f} to {max(ratios):.2f} of flash-linear-attention's time" in page
    scans = [*beside_a_scan("Linear attention on a CPU", 10, 6, 9), *beside_a_scan("The delta rule on a CPU", 8, 5)]
    assert f"is {1 / max(scans):.0f} to {1 / min(scans):.0f} times faster than through a hand-written scan" in page


def test_cases_that_others_win_are_as_measured():
    page = " ".join(README.split())
    found = [
        row for row in rows("Linear attention on an H200: the triton platform") if row[1] == "g_gamma" and "x64x64" in row[0]
    ]
    assert f"0.068 ms for our {found[0][2]}" in page
