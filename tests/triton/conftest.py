"""What several files of tests of the triton platform share."""

from __future__ import annotations

import pytest


@pytest.fixture
def launched(monkeypatch) -> set[str]:
    """The names of the Gluon kernels that were interpreted."""
    from ejkernel.callib import _gluon  # which needs Triton

    names: set[str] = set()
    launch = _gluon.launch

    def noted(kernel, *args):
        names.add(kernel.fn.__name__)
        return launch(kernel, *args)

    monkeypatch.setattr(_gluon, "launch", noted)
    return names
