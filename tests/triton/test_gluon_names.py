"""A Triton whose Gluon lacks a name gives calls to portable kernels; a mistake in one of our Gluon kernels is raised."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")

import ejkernel.kernels._triton
from ejkernel.kernels._linear import LinearConfig
from ejkernel.kernels._triton import _gluon
from ejkernel.kernels._triton.linear import _plan
from tests.triton.test_routes import problem

GLUON = "triton.experimental.gluon"
LANGUAGE = f"{GLUON}.language"
MODULES = {"gl": LANGUAGE, "gluon": GLUON, "triton": "triton", "async_copy": f"{LANGUAGE}.nvidia.ampere.async_copy"}


def kernels() -> list[Path]:
    files = sorted(Path(ejkernel.kernels._triton.__file__).parent.rglob("kernels/*.py"))
    return [file for file in files if "@gluon.jit" in file.read_text()]


def needed(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """(module, name) of what a file reads of Triton and Gluon when it is imported."""
    for statement in tree.body:
        if isinstance(statement, ast.ImportFrom) and statement.module and statement.module.startswith(GLUON):
            yield from ((statement.module, alias.name) for alias in statement.names)
        parts = statement.decorator_list if isinstance(statement, ast.FunctionDef) else [statement]
        for node in [node for part in parts for node in ast.walk(part)]:
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in MODULES:
                yield MODULES[node.value.id], node.attr


@pytest.mark.parametrize("file", kernels(), ids=lambda file: file.name)
def test_the_names_that_a_gluon_kernel_is_imported_with_are_asked_for(file):
    found = set(needed(ast.parse(file.read_text())))
    assert found
    listed = {
        (module, name)
        for module, names in _gluon.NAMES.items()
        for one in names
        for name in ((one,) if isinstance(one, str) else one)
    }
    assert found <= listed


def test_a_triton_without_them_takes_portable_kernels(monkeypatch):
    assert _gluon._has("triton", ("jit",))
    assert not _gluon._has("triton", ("jit", "a name of another version"))
    assert _gluon._has("triton", (("a name of another version", "jit"),))
    assert not _gluon._has("triton", (("a name of another version", "one more"),))
    assert not _gluon._has("triton.a_module_of_another_version", ())
    call = problem(("gk",), 64, 64, 2048)
    assert _plan.Plan.of(call, LinearConfig()).warpgroups == _gluon.HAS_GLUON
    monkeypatch.setattr(_plan, "HAS_GLUON", False)
    assert not _plan.Plan.of(call, LinearConfig()).warpgroups
