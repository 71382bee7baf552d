"""Nothing a test does is stored, and nothing stored elsewhere decides what a test runs."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("EJKERNEL_AUTOTUNE_POLICY", raising=False)
