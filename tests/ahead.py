"""Compiles the Triton kernels that the GPU's tests launch, on a machine that has no GPU:

    TRITON_CACHE_DIR=build/triton python -m pytest -p tests.ahead -m gpu -n 2

Nothing runs: kernels give zeros, and a test is skipped once it has launched what it launches. It fails where a kernel does not
compile. The cache serves a machine with the same Triton where it lies at the same path: compiling is most of the time that
those tests take.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Generator
from typing import Any

import jax.numpy as jnp
import pytest

HOPPER = 90


@dataclasses.dataclass
class Launches:
    """What has been compiled since the test began, and what has failed to."""

    compiled: int = 0
    failed: Exception | None = None


_seen = Launches()


def pytest_load_initial_conftests() -> None:
    """Before any test file is imported: they ask what device there is."""
    os.environ["TRITON_INTERPRET"] = "0"
    import ejkernel._device as devices
    import ejkernel.callib._compiled as compiling

    hopper = devices.Device("gpu", "NVIDIA H200", HOPPER)
    devices.describe = lambda device: hopper  # type: ignore[assignment]
    devices.backend_of = lambda device: hopper.backend
    compiling.capability = lambda: HOPPER  # type: ignore[assignment]

    def compile_only(kernel: Any, names: Any, args: Any, outputs: Any, _: Any, constants: Any, *rest: Any) -> Any:
        (options,) = (x for x in rest if isinstance(x, compiling.Options))
        signature, absent = compiling.signature_of(names, [*args, *outputs])
        try:
            compiling.compile_to_fit(kernel, signature, {**constants, **absent}, options, HOPPER)
        except Exception as error:
            _seen.failed = error
            raise
        _seen.compiled += 1
        return [jnp.zeros(x.shape, x.dtype) for x in outputs]

    compiling.run_compiled = compile_only  # type: ignore[assignment]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, Any, Any]:
    _seen.compiled, _seen.failed = 0, None
    try:
        yield
    except Exception:  # of a comparison with zeros, or of what needs the GPU itself
        if _seen.failed is not None:
            raise _seen.failed from None
    pytest.skip(f"compiled {_seen.compiled} launches")
