"""Channels that tiles divide, but fewer than the power of two that rows are stored with: the last tile lies beyond all of them.

What lies there in memory is the next head's, or nothing at all. 96 is three tiles of 32, 192 of 64, 384 of 128.
"""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")

from ejkernel._device import device_of
from ejkernel.kernels._triton import gated_delta_rule
from ejkernel.testing.compare import assert_close, relative_rms
from ejkernel.testing.delta_cases import DeltaCase
from tests.triton.linear_cases import Case
from tests.triton.linear_reference import value_and_grads
from tests.triton.test_interpreted import TOLERANCE, run

ON_GPU = device_of(()).backend == "gpu"
pytestmark = [pytest.mark.gpu] if ON_GPU else []

DELTA = [
    DeltaCase(
        f"{dtype}-{kind}-{K}", batch=1, time=66, heads=2, key_heads=1, key_channels=K, value_channels=16, gate="channel",
        gate_kind=kind, dtype=dtype,
    )
    for dtype, kind, K in (
        ("float32", "mild", 96), ("float16", "resets", 160), ("bfloat16", "mild", 192), ("bfloat16", "resets", 192),
    )
]  # fmt: skip
LINEAR = [
    Case(gates, strength, shape=(1, 66, 2, 1, K, V), dtype="bfloat16", block_q=64)
    for gates, strength, K, V in (
        (("gk",), "mild", 96, 16), (("gk",), "resets", 192, 16), (("gk",), "mild", 384, 16), (("gk", "gv"), "resets", 16, 192),
        (("gk", "gv"), "mild", 16, 384), (("g",), "mild", 192, 16),
    )
]  # fmt: skip


@pytest.mark.parametrize("case", DELTA, ids=str)
def test_delta_rule(case):
    assert_close(case.evaluate(gated_delta_rule), case.expected(), case.tolerance)


@pytest.mark.parametrize("case", LINEAR, ids=str)
def test_linear(case):
    values, grads = run(case)
    want_values, want_grads = value_and_grads(case.arrays(), case.weights(), case.shape[4] ** -0.5)
    errors = {"output": relative_rms(values[0], want_values[0]), "final state": relative_rms(values[1], want_values[1])}
    errors |= {f"d{name}": relative_rms(grads[name], want_grads[name]) for name in grads}
    assert max(errors.values()) < TOLERANCE[case.dtype], errors
