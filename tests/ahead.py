"""Compiles the Triton kernels that the GPU's tests launch, on a machine that has no GPU:

    TRITON_CACHE_DIR=build/triton python -m pytest -p tests.ahead -m "gpu and not alone" -n 2

Nothing runs: kernels give zeros, no error is large, and a test is skipped once it has launched what it launches. It fails
where a kernel does not compile. The cache serves a machine with the same Triton (`tests.carried` brings it there): compiling is
most of the time that those tests take.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from ejkernel.testing.ahead import Launches, pretend

_seen = Launches()


def pytest_load_initial_conftests() -> None:
    """Before any test file is imported: they ask what device there is, and take their comparisons by name."""
    global _seen
    _seen = pretend()
    import ejkernel.testing.compare as compare

    compare.relative_rms = lambda got, want: 0.0  # what a test launches after its first comparison is compiled, too


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, Any, Any]:
    _seen.forget()
    try:
        yield
    except Exception:  # of another comparison with zeros, or of what needs the GPU itself
        if _seen.failed is not None:
            raise _seen.failed from None
    pytest.skip(f"compiled {_seen.compiled} launches")
