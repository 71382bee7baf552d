"""Doctests come from the whole package; what needs a library that is not there is left out; `--few` takes a sample."""

from __future__ import annotations

import importlib.util
from collections import defaultdict

import pytest


def _there(*names: str) -> bool:
    return all(importlib.util.find_spec(name) for name in names)


collect_ignore_glob = [] if _there("triton") else ["ejkernel/kernels/_triton/*"]
collect_ignore_glob += [] if _there("typer", "rich") else ["ejkernel/cli/_*", "tests/cli/test_*"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--few", type=int, metavar="N", help="of each test, N of its cases at most, none of those marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--few`: every test is in, but a table of cases is represented by some of them, spread over its length."""
    if (few := config.getoption("--few")) is None:
        return
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow") is None:
            cases[item.nodeid.split("[")[0]].append(item)
    kept = {item for own in cases.values() for item in _spread(own, few)}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    items[:] = [item for item in items if item in kept]


def _spread(items: list[pytest.Item], few: int) -> list[pytest.Item]:
    """At most `few` items, the first of `few` stretches of about equal length."""
    return items if len(items) <= few else [items[i * len(items) // few] for i in range(few)]
