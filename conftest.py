"""Doctests are collected from the whole package; what needs a library that is not there is left out."""

import importlib.util


def _there(*names: str) -> bool:
    return all(importlib.util.find_spec(name) for name in names)


collect_ignore_glob = [] if _there("triton") else ["ejkernel/kernels/_triton/*"]
collect_ignore_glob += [] if _there("typer", "rich") else ["ejkernel/cli/_*", "tests/cli/test_*"]
