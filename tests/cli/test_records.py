"""Records are all that the command knows of operations."""

from __future__ import annotations

import ast
import importlib.util
import json
import re
from pathlib import Path

import pytest

from ejkernel.cli._doctor import _remedies
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


def said(tree: ast.AST) -> list[str]:
    """Every string that a program may print: all but docstrings, which have examples for readers."""
    documented = [node for node in ast.walk(tree) if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef))]
    first = [node.body[0].value for node in documented if node.body and isinstance(node.body[0], ast.Expr)]
    constants = [node for node in ast.walk(tree) if isinstance(node, ast.Constant) and node not in first]
    return [node.value for node in constants if isinstance(node.value, str)]


def test_what_they_print_names_an_operation_by_its_record_alone():
    families = re.compile(r"linear|lightning|\bgla|recurrent|softmax|delta", re.IGNORECASE)
    named = {file.name: [text for text in said(ast.parse(file.read_text())) if families.search(text)] for file in sources()}
    assert {file: texts for file, texts in named.items() if texts} == {}


def test_the_libraries_of_rivals_are_those_that_their_records_name(run):
    names = {make(op).library for op in records() for make in op.rivals.values()} - {None}
    assert names >= {"flash-linear-attention", "jax-linear-attention"}
    assert names <= set(json.loads(run("doctor", "--json", code=0).out)["versions"])


def test_without_triton_the_operations_are_named_that_have_kernels_there():
    platforms = {"one": {"xla": None, "triton": "No module named 'triton'"}, "other": {"xla": None}}
    found = {"device": {"backend": "gpu"}, "versions": {"triton": None}, "operations": platforms}
    assert any("its kernels take no call of one: pip install" in remedy for remedy in _remedies(found))


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
