"""The shared cases with 64 bits enabled, in float32 and float64: a few of each operation, with `EJKERNEL_ALL_CASES=1` all."""

from __future__ import annotations

import dataclasses
import functools
import os

import jax
import pytest

from ejkernel import kernel_registry
from ejkernel.kernels._attention import AttentionConfig
from ejkernel.kernels._delta import GatedDeltaRuleConfig
from ejkernel.kernels._linear import LinearConfig
from ejkernel.testing import attention_cases, delta_cases, linear_cases
from ejkernel.testing.compare import assert_close

ALL = "EJKERNEL_ALL_CASES" in os.environ


def versions(cases, few):
    """The cases in both dtypes; those of 16 bits as they are."""
    taken = cases if ALL else cases[:: -(-len(cases) // few)]
    dtypes = lambda case: ("float32", "float64") if case.dtype == "float32" else (case.dtype,)
    return [dataclasses.replace(case, name=f"{case}-{dtype}", dtype=dtype) for case in taken for dtype in dtypes(case)]


@pytest.fixture(autouse=True)
def _sixty_four_bits():
    with jax.enable_x64(True):
        yield


def check_recurrence(case, operation, chunked, stepwise):
    function, want = kernel_registry.get(operation, "xla"), case.expected()
    got = case.evaluate(functools.partial(function, cfg=chunked))
    assert (got["output"].dtype, got["state"].dtype) == (case.dtype, "float64" if case.dtype == "float64" else "float32")
    assert_close(got, want, case.tolerance)
    values = {name: want[name] for name in ("output", "state")}
    assert_close(case.values(functools.partial(function, cfg=stepwise)), values, case.tolerance)


@pytest.mark.parametrize("case", versions(linear_cases.CASES, 3), ids=str)
def test_recurrent(case):
    check_recurrence(case, "recurrent", LinearConfig("chunked", 32), LinearConfig("recurrent", 16))


@pytest.mark.parametrize("case", versions(linear_cases.LIGHTNING_CASES, 1), ids=str)
def test_lightning(case):
    check_recurrence(case, "lightning_attn", LinearConfig("chunked", 32), LinearConfig("recurrent", 16))


@pytest.mark.parametrize("case", versions(delta_cases.CASES, 2), ids=str)
def test_delta_rule(case):
    chunked, stepwise = GatedDeltaRuleConfig("chunked", 16), GatedDeltaRuleConfig("recurrent", 16)
    check_recurrence(case, "gated_delta_rule", chunked, stepwise)


@pytest.mark.parametrize("cfg", [AttentionConfig("direct"), AttentionConfig(block_q=16, block_k=24)], ids=["direct", "blocks"])
@pytest.mark.parametrize("case", versions(attention_cases.CASES, 3), ids=str)
def test_attention(case, cfg):
    function = functools.partial(kernel_registry.get("attention", "xla"), cfg=cfg)
    got = case.value_and_gradients(function, weights=cfg.schedule == "direct")
    assert got["output"].dtype == ("float64" if case.dtype == "float64" else "float32")  # where 16 bits are shown in 32
    assert_close(got, {name: case.expected()[name] for name in got}, case.tolerance)
