"""What the length of packed segments costs by a model, where no GPU is at hand; `benchmarks.packed_segments` prints it.

A call of packed sequences has two passes: one scans every segment from whose end another starts, the other all of them.
Programs start in the order of the table, the longest first, on the 132 multiprocessors of an H200; each scans its chunks one
after another. How many share a multiprocessor, and what a chunk then takes, is from benchmarks/NOTES_gpu.md:

    one gate per head     ends 0.036 ms for 32 chunks of two programs, 0.050 for 31 of three, 0.069 with a few in a second turn;
                          scan 0.149 for 64 chunks in turn (47, 50 and the last section)
    gate per key channel  ends 0.059 ms for 32 chunks of one program; scan 0.322 for 64 in turn (57, 58)

On the row that it was made from it says 0.050 + 0.153 where 0.048 + 0.149 were measured, and 0.120 + 0.330 for 0.123 + 0.322.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ejkernel.callib import cdiv
from ejkernel.kernels._triton.linear._chunks import MULTIPROCESSORS

CHUNK = 64
START = 1.0  # chunks' time until a program has its first chunk


@dataclasses.dataclass(frozen=True)
class Pass:
    """A pass over segments.

    Attributes:
        programs: of a segment and head.
        chunk: microseconds that a chunk takes where one, two, .. programs share a multiprocessor: as many as fit.
    """

    programs: int
    chunk: tuple[float, ...]

    def microseconds(self, segments: Sequence[int], heads: int) -> float:
        """Of all programs of segments of so many chunks, which start in this order."""
        waiting = [n + START for n in segments for _ in range(heads * self.programs)][::-1]
        running: list[list[float]] = [[] for _ in range(MULTIPROCESSORS)]
        now = 0.0
        while True:
            free = [own for own in running if len(own) < len(self.chunk)]
            while waiting and free:
                min(free, key=len).append(waiting.pop())
                free = [own for own in free if len(own) < len(self.chunk)]
            if not any(running):
                return now
            step = min(min(own) * self.chunk[len(own) - 1] for own in running if own)
            now += step
            for own in running:
                own[:] = [left for left in (left - step / self.chunk[len(own) - 1] for left in own) if left > 1e-9]


@dataclasses.dataclass(frozen=True)
class Call:
    """A call's two passes."""

    ends: Pass
    scan: Pass

    def microseconds(self, lengths: Sequence[int], heads: int, segment: int) -> tuple[float, float]:
        """(the segments' ends, the scan) of sequences of so many tokens, cut into segments of so many chunks."""
        left, passed_on = [], []
        for chunks in (cdiv(n, CHUNK) for n in lengths):
            full, rest = divmod(chunks, segment)
            cut = [segment] * full + [rest] * (rest > 0 or chunks == 0)
            left += cut
            passed_on += cut[:-1]
        longest_first = lambda cut: sorted(cut, reverse=True)
        return (
            self.ends.microseconds(longest_first(passed_on), heads),
            self.scan.microseconds(longest_first(left), heads),
        )


CALLS = {
    "one gate per head": Call(ends=Pass(2, (0.95, 1.1, 1.5)), scan=Pass(1, (2.25,))),
    "a gate per key channel": Call(ends=Pass(1, (1.8,)), scan=Pass(1, (4.9,))),
}
