"""What libtpu's compiler says of a kernel: the bundles of its loop, read off the dump of its final schedule.

A bundle is one very long instruction, one a cycle. Memory traffic and stalls are not in a schedule, so it ranks tiles and says
nothing certain about time.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np


class Schedule(NamedTuple):
    """What the compiler says of one kernel, on one of the ways through its loop."""

    way: str  # its name; empty for a loop that has one way
    bundles: int  # of a step, without regions that most steps skip
    spills: int  # of them, with a register stored or loaded that did not fit
    vmem: int  # bytes


class _Region(NamedTuple):
    """Bundles that a branch skips."""

    first: int
    end: int

    @property
    def size(self) -> int:
        return self.end - self.first

    def follows(self, other: _Region) -> bool:
        return 0 <= self.first - other.end <= 8  # a condition lies between


def schedules(text: str, allocations: str, ways: tuple[str, ...] = ()) -> list[Schedule]:
    """From the dump of final bundles and that of the kernel's allocations: one for each way through the loop.

    A kernel with a shorter way for weakly gated chunks has both ways in its loop, one behind the other, and a step takes one of
    them. Any other branch over less than half of the loop is one that the steady state takes: it skips what is done at a
    sequence's start or end.

    Args:
        ways: the names of the two ways of such a kernel, in the order of its code. A loop without them has one.
    """
    lines = [(_address(line), line) for line in text.splitlines() if _BUNDLE.match(line)]
    first, last, regions = _loop(lines)
    loop = last - first + 1
    either = _either(regions, loop) if ways else ()
    rare = {n for region in regions if region not in either and region.size < loop / 2 for n in range(*region)}
    vmem = sum(int(size, 16) for size in re.findall(r"space=vmem, size = (0x[0-9a-f]+)", allocations))
    found = []
    for way, other in zip(ways, reversed(either), strict=True) if either else (("", _Region(0, 0)),):
        skipped = rare | set(range(*other))
        taken = [line for at, line in lines if first <= at <= last and at not in skipped]
        found.append(Schedule(way, loop - len(skipped), sum("_spill]" in line for line in taken), vmem))
    return found


_BUNDLE = re.compile(r"\s*((?:0x)?[0-9a-f]+) .*:")


def _address(line: str) -> int:
    match = _BUNDLE.match(line)
    assert match is not None
    return int(match[1], 16)


def _loop(lines: list[tuple[int, str]]) -> tuple[int, int, list[_Region]]:
    """The first and last bundle of the grid's loop, and the regions in it that a branch may skip."""
    first = last = None
    forward = []
    for at, line in lines:
        if " LB: " in line and first is None:
            first = at
        if target := re.search(r"sbr\.rel.*?target bundleno = (\d+)", line):
            if int(target[1]) == first:
                last = at
            elif int(target[1]) > at:
                forward.append(_Region(at, int(target[1])))
    if first is None or last is None:  # a grid of one step
        first, last = 0, lines[-1][0]
    return first, last, [region for region in forward if first <= region.first and region.end <= last]


def _either(regions: list[_Region], loop: int) -> tuple[_Region, ...]:
    """The two ways through a loop, where it has two: large regions, the second of which begins where the first ends."""
    large = [region for region in regions if loop / 10 < region.size < 0.9 * loop]
    pairs = [(a, b) for a in large for b in large if b.follows(a)]
    return pairs[0] if len(pairs) == 1 else ()


def kernels_of(jaxpr: Any) -> Iterator[tuple[str, int, int]]:
    """(name, steps of the grid, bytes of operands and results) of every kernel in a program."""
    size = lambda var: int(np.prod(var.aval.shape, dtype=np.int64)) * np.dtype(var.aval.dtype).itemsize
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "pallas_call":
            steps = int(np.prod(eqn.params["grid_mapping"].grid))
            yield eqn.params["name"], steps, sum(map(size, (*eqn.invars, *eqn.outvars)))
            continue
        for value in eqn.params.values():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(inner, "jaxpr") or hasattr(inner, "eqns"):
                    yield from kernels_of(getattr(inner, "jaxpr", inner))
