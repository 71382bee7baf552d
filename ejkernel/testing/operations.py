"""Operations of a compiled program, counted in its text: products and elementwise ones, loops as often as they run."""

from __future__ import annotations

import functools
import math
import re

_LINE = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*)$")
_FREE = (
    frozenset({"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "reshape", "broadcast", "iota", "copy"})
    | frozenset({"transpose", "slice", "dynamic-slice", "dynamic-update-slice", "concatenate", "pad", "gather", "convert"})
    | frozenset({"while", "call", "fusion", "conditional", "custom-call", "after-all", "partition-id", "replica-id"})
    | frozenset({"all-gather", "all-reduce", "collective-permute"})
)


def counted(text: str, trips_else: int = 0) -> float:
    """All operations of a program on one device: a product of two numbers and its sum are two, any other one.

    trips_else: of loops whose length the program does not say.
    """
    bodies: dict[str, list[str]] = {}
    entry, name = "", ""
    for line in text.splitlines():
        if head := re.match(r"^(ENTRY )?%?([\w.\-]+) .*\{$", line):
            name = head[2]
            bodies[name], entry = [], name if head[1] else entry
        elif " = " in line and name:
            bodies[name].append(line)

    @functools.cache
    def of(computation: str) -> float:
        shapes: dict[str, list[int]] = {}
        total = 0.0
        for line in bodies[computation]:
            found = _LINE.match(line)
            if found is None:
                continue
            name, kind, operation, rest = found.groups()
            shapes[name] = _shape(kind)
            total += _own(operation, rest, shapes, name)
            called = re.findall(r"(?:calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)", rest)
            said = re.search(r'known_trip_count":\{"n":"(\d+)"', rest) if operation == "while" else None
            times = int(said[1]) if said else trips_else if operation == "while" else 1
            if operation in ("while", "call", "fusion", "conditional"):
                total += times * sum(of(each) for each in called)
            if operation == "while" and not times:
                raise ValueError(f"a loop of unknown length: {line[:200]}")
        return total

    return of(entry)


def _shape(kind: str) -> list[int]:
    found = re.match(r"\w+\[([\d,]*)\]", kind)
    return [int(n) for n in found[1].split(",") if n] if found else []


def _own(operation: str, rest: str, shapes: dict[str, list[int]], name: str) -> float:
    if operation == "dot":
        left = re.match(r"(?:\w+\[[\d,]*\]\S* )?%?([\w.\-]+)", rest)
        axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", rest)
        assert left, rest
        contracted = [shapes[left[1]][int(n)] for n in (axes[1].split(",") if axes else []) if n]
        return 2.0 * math.prod(shapes[name]) * math.prod(contracted)
    if operation == "reduce":
        left = re.match(r"(?:\w+\[[\d,]*\]\S* )?%?([\w.\-]+)", rest)
        return float(math.prod(shapes[left[1]])) if left and left[1] in shapes else 0.0
    return 0.0 if operation in _FREE else float(math.prod(shapes[name]))
