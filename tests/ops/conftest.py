"""Every test has its own cache folder, an empty memory, and warnings that were never given before."""

from __future__ import annotations

import pytest

from ejkernel.ops import notices, reporting
from ejkernel.ops.config.cache import shared_cache
from tests.ops import racers


@pytest.fixture(autouse=True)
def _alone(tmp_path, monkeypatch):
    monkeypatch.setenv("EJKERNEL_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("EJKERNEL_AUTOTUNE_POLICY", raising=False)
    notices.forget_warnings()
    reporting.clear_report()
    shared_cache().clear()
    racers.release.clear()
    yield
    racers.release.set()
