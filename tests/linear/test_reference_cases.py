"""Every implementation of the linear recurrence against the float64 step-by-step form, with every schedule."""

from __future__ import annotations

import functools

import pytest

from ejkernel import kernel_registry
from ejkernel.kernels._linear import LinearConfig
from ejkernel.kernels._linear.operations import recurrent as recurrent_problem
from ejkernel.kernels._registry import Backend
from ejkernel.testing.compare import assert_close
from ejkernel.testing.linear_cases import CASES, LinearCase

CHUNKED, RECURRENT = LinearConfig("chunked", 32), LinearConfig("recurrent", 16)


@functools.cache
def expected(case: LinearCase):
    return case.expected()


def _implementations() -> list:
    entries = kernel_registry.list_implementations("recurrent")
    return [pytest.param(e, id=str(e.platform), marks=[pytest.mark.gpu] * (e.backend is Backend.GPU)) for e in entries]


@functools.cache
def with_config(function, cfg: LinearConfig):
    """One object for each function and config, so that cases of the same shapes compile once."""
    return functools.partial(function, cfg=cfg)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("entry", _implementations())
def test_matches_reference(entry, case: LinearCase):
    arrays, options = case.arguments()
    if (reason := kernel_registry.refusal(entry, recurrent_problem(**arrays, **options))) is not None:
        pytest.skip(f"refused: {reason}")
    assert_close(case.evaluate(with_config(entry.function, CHUNKED)), expected(case), case.tolerance)
    stepwise = with_config(entry.function, RECURRENT)
    if case.lengths is not None or case.reverse or not case.gates:  # the gradient differs only in where states are kept
        assert_close(case.evaluate(stepwise), expected(case), case.tolerance)
    else:
        want = {name: expected(case)[name] for name in ("output", "state")}
        assert_close(case.values(stepwise), want, case.tolerance)


def test_every_case_has_its_own_name():
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("name", ["output", "state", "dgk"])
def test_a_wrong_result_is_noticed(name):
    case = LinearCase("small", time=9, gates=("gk",))
    wrong = {n: x * (1 + 3e-5 * (n == name)) for n, x in expected(case).items()}
    with pytest.raises(AssertionError, match=name):
        assert_close(wrong, expected(case), case.tolerance)
