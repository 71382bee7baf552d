"""Records are all that the command knows of operations."""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest

from ejkernel.kernels._registry import kernel_registry
from ejkernel.testing.compare import VALUES
from ejkernel.testing.record import find, records

NAMES = re.compile(r"linear|lightning|gla|recurrent|softmax|attention|delta_", re.IGNORECASE)


def sources() -> list[Path]:
    found = []
    for package in ("ejkernel.cli", "ejkernel.ops"):
        spec = importlib.util.find_spec(package)
        found += [file for folder in spec.submodule_search_locations for file in Path(folder).rglob("*.py")]
    return found


def spoken(tree: ast.AST) -> list[str]:
    """Every name in a program, and every string that is nothing but one word."""
    found: list[str] = []
    for node in ast.walk(tree):
        found += [
            getattr(node, field)
            for field in ("id", "attr", "name", "arg", "module")
            if isinstance(getattr(node, field, None), str)
        ]
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"[\w.]+", node.value):
            found.append(node.value)
    return found


def test_neither_the_command_nor_the_configuration_names_an_operation():
    assert len(sources()) > 30
    named = {file.name: [word for word in spoken(ast.parse(file.read_text())) if NAMES.search(word)] for file in sources()}
    assert {file: words for file, words in named.items() if words} == {}


def test_every_operation_of_the_registry_has_a_record():
    without = [name for name in kernel_registry.list_algorithms() if find(name) is None]
    assert without == []
    assert {op.name for op in records()} >= {"attention", "recurrent_attention", "gla_attention", "lightning_attention"}


@pytest.mark.parametrize("op", records(), ids=lambda op: op.name)
def test_a_record_is_whole(op):
    for backend in ("cpu", "gpu"):
        for text in op.usual_shapes(backend):
            shape = op.shape(text, dtype=op.usual_dtype(backend))
            assert op.shape(str(shape), gates=()) == shape  # what is saved is read back
            assert str(shape).split("x")[1] == str(shape.time)
            assert op.operations(shape, "forward+backward") > op.operations(shape, "forward") > 0
    names = [case.name for case in op.cases()]
    assert len(set(names)) == len(names)
    case = op.cases()[0]
    got, want = case.values(op.registry.get(op.op_id, "xla")), case.expected()
    assert set(got) == set(want) & set(VALUES)
