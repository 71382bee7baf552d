"""Every candidate of every route on TPUs, interpreted, on bfloat16 calls with 64 and 128 channels and strong gates."""

from __future__ import annotations

import functools

import pytest

from ejkernel.kernels._pallas import attention, gated_delta_rule, recurrent
from ejkernel.kernels._pallas._chips import interpreted
from ejkernel.kernels._pallas.gated_delta_rule.routes import ROUTES as DELTA_ROUTES
from ejkernel.kernels._pallas.linear.routes import ROUTES as LINEAR_ROUTES
from ejkernel.testing import attention_cases, delta_cases, linear_cases
from ejkernel.testing.compare import assert_close
from ejkernel.testing.delta_cases import DeltaCase
from ejkernel.testing.linear_cases import LinearCase


def wide(cases):
    return [case for case in cases if case.name.startswith(("bfloat16-64-channels", "bfloat16-128-channels"))]


STEPS = [
    (recurrent, LinearCase("decode", gates=("g", "gk", "gv"), gate_kind="resets", dtype="bfloat16", batch=1, time=3,
                           key_channels=64, value_channels=128, initial_state=True)),
    (gated_delta_rule, DeltaCase("decode", gate="head", gate_kind="resets", dtype="bfloat16", batch=2, time=16, key_heads=1,
                                 key_channels=64, value_channels=128, initial_state=True)),
]  # fmt: skip
RECURRENCES = [
    *((recurrent, case) for case in wide(linear_cases.CASES)),
    *((gated_delta_rule, case) for case in wide(delta_cases.CASES)),
    *STEPS,
]


@pytest.mark.long
@pytest.mark.parametrize(("function", "case"), [pytest.param(*x, id=f"{x[0].signature.name}-{x[1]}") for x in RECURRENCES])
def test_every_candidate_is_right(function, case):
    want = case.expected()
    with interpreted():
        for cfg in function.implementation.candidates(case.problem):
            assert_close(case.evaluate(functools.partial(function, cfg=cfg)), want, case.tolerance)


@pytest.mark.long
@pytest.mark.parametrize("case", wide(attention_cases.CASES), ids=str)
def test_every_candidate_of_attention_is_right(case):
    with interpreted():
        for cfg in attention.implementation.candidates(case.problem):
            case.check(functools.partial(attention, cfg=cfg), weights=False)


def test_there_is_a_case_of_every_route():
    with interpreted():
        names = {f.implementation.route(case.problem, f.implementation.heuristic(case.problem)) for f, case in RECURRENCES}
        channels = {(f.signature.name, case.problem.shape[3]) for f, case in RECURRENCES}
    assert {name.partition(" (")[0] for name in names} == {route.title for route in (*LINEAR_ROUTES, *DELTA_ROUTES)}
    assert channels >= {(name, size) for name in ("recurrent", "gated_delta_rule") for size in (64, 128)}
    assert {case.channels for case in wide(attention_cases.CASES)} == {64, 128}
