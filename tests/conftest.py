"""Nothing a test does is stored, and nothing stored elsewhere decides what a test runs."""

from __future__ import annotations

import importlib.util
import os

import pytest

from ejkernel._device import backend_of, default_device
from tests.interpreter import quicken

# Triton decides when a kernel is decorated whether it is interpreted, so this comes before any of them is imported. Where there
# is a GPU, kernels are compiled (make test-gpu).
if backend_of(default_device()) == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if importlib.util.find_spec("triton"):
        quicken()


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("EJKERNEL_AUTOTUNE_POLICY", raising=False)
