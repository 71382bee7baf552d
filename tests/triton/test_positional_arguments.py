"""Helpers of kernels take many values by position, where a swapped pair would be silent: names say where each belongs.

A value that is handed on under the name of one of the helper's parameters must stand at that parameter's place. Launches
themselves pass everything by name (`triton_call`).
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import ejkernel.kernels

ROOT = Path(ejkernel.kernels.__file__).parent / "_triton"
FILES = sorted([*ROOT.rglob("kernels/*.py"), *ROOT.rglob("_kernels.py")])
MANY = 8
# (file, helper, argument, parameter whose place it has) where that is meant: a state that is held by columns, the part of a
# state as its first row, a row-major state's stride, a gate that has as many heads as the states.
CROSSED = {
    ("scans.py", "load_state", "b", "a"),
    ("key_value_scan.py", "state_at_start", "b", "a"),
    ("rows_scan.py", "state_at_start", "b", "a"),
    ("key_value_scan.py", "_store_part", "PART", "a"),
    ("key_value_scan.py", "state_at_start", "DB", "STRIDE_A"),
    ("state_scan.py", "state_at_start", "DB", "STRIDE_A"),
    ("decayed_rows.py", "channel_log_decay", "H", "HG"),
    ("weak_gradients.py", "channel_log_decay", "H", "HG"),
    ("chunks_by_warpgroups.py", "copy_rows", "C", "rows"),  # prepared rows are all there
}


def definitions() -> dict[str, list[str]]:
    """The parameters of every function under `kernels`, by name; without those whose name is defined differently elsewhere."""
    found: dict[str, set[tuple[str, ...]]] = {}
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.FunctionDef):
                found.setdefault(f"{file.name}:{node.name}", set()).add(tuple(a.arg for a in node.args.args))
                found.setdefault(node.name, set()).add(tuple(a.arg for a in node.args.args))
    return {name: list(next(iter(parameters))) for name, parameters in found.items() if len(parameters) == 1}


def calls() -> Iterator[tuple[Path, ast.Call, list[str]]]:
    known = definitions()
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(node.args) >= MANY:
                parameters = known.get(f"{file.name}:{node.func.id}") or known.get(node.func.id)
                if parameters is not None:
                    yield file, node, parameters


def misplaced(node: ast.Call, parameters: list[str]) -> list[tuple[str, str]]:
    """(argument, the parameter at its place) where the argument has the name of another parameter."""
    pairs = [(a.id, p) for a, p in zip(node.args, parameters, strict=False) if isinstance(a, ast.Name)]
    return [(given, place) for given, place in pairs if given != place and given in parameters]


def test_values_stand_at_the_places_of_their_names():
    found = {
        (file.name, node.func.id, given, place)
        for file, node, parameters in calls()
        for given, place in misplaced(node, parameters)
        if isinstance(node.func, ast.Name)
    }
    assert found == CROSSED


def test_there_are_calls_to_check():
    assert sum(1 for _ in calls()) > 100


@pytest.mark.parametrize(
    ("call", "expected"),
    [("f(a, b, c)", []), ("f(a, c, b)", [("c", "b"), ("b", "c")]), ("f(a, x, c)", []), ("f(a, a, c)", [("a", "b")])],
)
def test_a_swapped_pair_is_seen(call, expected):
    node = ast.parse(call, mode="eval").body
    assert isinstance(node, ast.Call)
    assert misplaced(node, ["a", "b", "c"]) == expected
