"""Every implementation of the delta rule against the float64 step-by-step form, with every schedule."""

from __future__ import annotations

import functools

import jax
import pytest

from ejkernel import kernel_registry
from ejkernel.kernels._delta import DeltaProblem, GatedDeltaRuleConfig
from ejkernel.kernels._registry import Backend
from ejkernel.testing.compare import assert_close
from ejkernel.testing.delta_cases import CASES, DeltaCase

CHUNKED, RECURRENT = GatedDeltaRuleConfig("chunked", 32), GatedDeltaRuleConfig("recurrent", 16)
SHORT_CHUNKS = GatedDeltaRuleConfig("chunked", 16)  # which compile faster


@functools.cache
def expected(case: DeltaCase):
    return case.expected(), case.tolerance


def _implementations() -> list:
    entries = kernel_registry.list_implementations("gated_delta_rule")
    return [pytest.param(e, id=str(e.platform), marks=[pytest.mark.gpu] * (e.backend is Backend.GPU)) for e in entries]


@functools.cache
def with_config(function, cfg: GatedDeltaRuleConfig):
    """One object for each function and config, so that cases of the same shapes compile once."""
    return functools.partial(function, cfg=cfg)


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("entry", _implementations())
def test_matches_reference(entry, case: DeltaCase):
    arrays, options = case.arguments()
    if (reason := kernel_registry.refusal(entry, DeltaProblem.from_arguments(**arrays, **options))) is not None:
        pytest.skip(f"refused: {reason}")
    want, tolerance = expected(case)
    plain = case.lengths is None and case.heads == 2 and not case.reverse and case.dtype == "float32"
    assert_close(case.evaluate(with_config(entry.function, CHUNKED if plain else SHORT_CHUNKS)), want, tolerance)
    values = {name: want[name] for name in ("output", "state")}
    assert_close(case.values(with_config(entry.function, RECURRENT)), values, tolerance)


@pytest.mark.parametrize("name", ["head", "packed-channel-reverse"])
def test_the_gradient_of_calls_that_went_step_by_step(name):
    (case,) = [case for case in CASES if case.name == name]
    function = kernel_registry.get("gated_delta_rule", "xla")
    assert_close(case.evaluate(functools.partial(function, cfg=RECURRENT)), *expected(case))


@pytest.mark.parametrize(("schedule", "gate"), [("chunked", "head"), ("chunked", "channel"), ("recurrent", None)])
def test_sixty_four_bits_are_exact_to_the_twelfth_digit(schedule, gate):
    with jax.enable_x64(True):
        case = DeltaCase("wide", gate=gate, lengths=(6, 0, 34), initial_state=True, l2norm=True, dtype="float64")
        function = kernel_registry.get("gated_delta_rule", "xla")
        got = case.evaluate(functools.partial(function, cfg=GatedDeltaRuleConfig(schedule, 16)))
        want = case.expected()
        assert_close(got, want, case.tolerance)


def test_every_case_has_its_own_name():
    assert len({case.name for case in CASES}) == len(CASES)


@pytest.mark.parametrize("name", ["output", "state", "dbeta"])
def test_a_wrong_result_is_noticed(name):
    case = DeltaCase("small", time=9, gate="channel")
    want, tolerance = expected(case)
    wrong = {n: x * (1 + 3e-5 * (n == name)) for n, x in want.items()}
    with pytest.raises(AssertionError, match=name):
        assert_close(wrong, want, tolerance)
