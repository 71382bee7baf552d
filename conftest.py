"""Doctests come from the whole package; what needs a library that is not there is left out; `--few` takes a sample.

JAX's settings belong to the process: whatever changes them, while tests are collected or run, is named and fails.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest


def _there(*names: str) -> bool:
    return all(importlib.util.find_spec(name) for name in names)


OF_TRITON = [
    "ejkernel/kernels/_triton/*",
    "ejkernel/callib/_gluon/*",
    "ejkernel/testing/segment_model.py",
    "tests/triton/[!t]*.py",
]
collect_ignore_glob = [] if _there("triton") else OF_TRITON
collect_ignore_glob += [] if _there("typer", "rich") else ["ejkernel/cli/_*", "tests/cli/test_*"]


def _settings() -> dict[str, Any]:
    """JAX's, and XLA's flags, which programs that tests start would inherit."""
    return {**jax.config.values, "XLA_FLAGS": os.environ.get("XLA_FLAGS")}


os.environ.setdefault("XLA_FLAGS", "")  # as under make: examples that are imported would ask for eight devices otherwise
AT_START = _settings()


def _changed(before: dict[str, Any]) -> str:
    """The settings that are not what they were, as text; empty where none is."""
    now = _settings()
    return ", ".join(f"{name}={now[name]!r}" for name in before if now[name] != before[name])


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Collecting doctests imports every file, programs too: what an import changes would hold for all tests after it."""
    if changed := _changed(AT_START):
        raise pytest.UsageError(f"{report.nodeid} changes JAX's settings when it is imported: {changed}.")


@pytest.fixture(autouse=True, scope="module")
def settings_stay() -> Iterator[None]:
    before = _settings()
    yield
    assert not (changed := _changed(before)), f"A test of this module left JAX's settings changed: {changed}."


# A compiled program takes some forty of the memory mappings that Linux gives a process, 65530 as a rule. Thousands of tests use
# them up, and the compiler ends the process where none is left.
MAPPINGS = Path("/proc/self/maps")
MANY_MAPPINGS = 30_000
_ended = itertools.count(1)


def pytest_runtest_teardown() -> None:
    """Every few tests: programs that nothing needs any more are dropped where they are many."""
    if next(_ended) % 20 == 0 and MAPPINGS.exists() and MAPPINGS.read_bytes().count(b"\n") > MANY_MAPPINGS:
        jax.clear_caches()


# With `--few` these run every test, by one case each; every other module runs a sample of its tests.
EVERY_TEST = ("tests/operations", "tests/ops", "tests/toy", "tests/types", "tests/linear/test_errors.py")
SHARED_CASES = ("test_reference_cases.py", "test_shared_cases.py")  # three times as many of these


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--few", type=int, metavar="N", help="of each module N tests at most, none of those that are slow")


@pytest.hookimpl(trylast=True)  # after hypothesis marked its own, which try many cases each
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--few` every module has its part, and what most calls go through all of it."""
    if (few := config.getoption("--few")) is None:
        return
    tests: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if not any(item.get_closest_marker(name) for name in ("slow", "long", "gpu", "tpu", "hypothesis")):
            tests[item.nodeid.split("[" if item.nodeid.startswith(EVERY_TEST) else "::")[0]].append(item)
    of = lambda name: 1 if "::" in name else 3 * few if name.endswith(SHARED_CASES) else few
    kept = {item for name, own in tests.items() for item in _spread(own, of(name))}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def _spread(items: list[pytest.Item], few: int) -> list[pytest.Item]:
    """At most `few` items, the first of as many stretches of about equal length."""
    return items if len(items) <= few else [items[i * len(items) // few] for i in range(few)]
