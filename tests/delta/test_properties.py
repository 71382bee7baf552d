"""Laws of the delta rule that hold whatever the numbers are, and random calls against the reference."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ejkernel.kernels._delta import GatedDeltaRuleConfig
from ejkernel.kernels._xla import recurrent
from ejkernel.kernels._xla.gated_delta_rule import gated_delta_rule
from ejkernel.testing.compare import assert_close, relative_rms
from ejkernel.testing.delta_cases import BETA_KINDS, KEY_KINDS, DeltaCase
from ejkernel.testing.linear_cases import GATE_KINDS

slow = functools.partial(settings, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
CHUNKED = GatedDeltaRuleConfig("chunked", 16)
CONFIGS = [CHUNKED, GatedDeltaRuleConfig("chunked", 64), GatedDeltaRuleConfig("recurrent", 4), None]


@st.composite
def cases(draw) -> DeltaCase:
    key_heads = draw(st.integers(1, 2))
    packed = draw(st.booleans())
    lengths = tuple(draw(st.lists(st.integers(0, 40), min_size=1, max_size=4))) if packed else None
    return DeltaCase(
        "drawn",
        batch=draw(st.integers(1, 2)),
        time=draw(st.integers(0, 150)),
        heads=key_heads * draw(st.integers(1, 2)),
        key_heads=key_heads,
        key_channels=draw(st.integers(1, 20)),
        value_channels=draw(st.integers(1, 20)),
        gate=draw(st.sampled_from([None, "head", "channel"])),
        gate_kind=draw(st.sampled_from(sorted(GATE_KINDS))),
        key_kind=draw(st.sampled_from(sorted(KEY_KINDS))),
        beta_kind=draw(st.sampled_from(sorted(set(BETA_KINDS) - {"near two"}))),
        initial_state=draw(st.booleans()),
        lengths=lengths,
        rank3=packed and draw(st.booleans()),
        reverse=draw(st.booleans()),
        l2norm=draw(st.booleans()),
        scale=draw(st.sampled_from([None, 1.0, -0.3])),
        seed=draw(st.integers(0, 1000)),
    )


@slow(max_examples=5)
@given(cases(), st.sampled_from(CONFIGS))
def test_any_call_matches_the_reference(case, cfg):
    want = case.expected()
    assert_close(case.evaluate(functools.partial(gated_delta_rule, cfg=cfg)), want, case.tolerance)


def arrays_of(gate: str | None, time: int) -> dict:
    return DeltaCase("law", gate=gate, time=time, initial_state=True).arguments()[0]


@pytest.mark.parametrize("gate", [None, "head", "channel"])
def test_a_prefix_does_not_change_when_later_inputs_do(gate):
    arrays = arrays_of(gate, 40)
    run = functools.partial(gated_delta_rule, cfg=CHUNKED)
    before, _ = run(**arrays)
    for at in (5, 16, 23):
        other = {name: x if name == "initial_state" else x.at[:, at:].multiply(-0.7) for name, x in arrays.items()}
        np.testing.assert_array_equal(run(**other)[0][:, :at], before[:, :at])


@pytest.mark.parametrize(("first", "second"), [(0, 9), (17, 23)])
def test_a_sequence_may_be_cut_anywhere(first, second):
    arrays = arrays_of("channel", first + second)
    cut = lambda part: {n: x if n == "initial_state" else x[:, part] for n, x in arrays.items()}
    whole, final = gated_delta_rule(**arrays)
    left, state = gated_delta_rule(**cut(slice(None, first)))
    right, end = gated_delta_rule(**(cut(slice(first, None)) | {"initial_state": state}))
    assert relative_rms(jnp.concatenate([left, right], 1), whole) < 4e-6
    assert relative_rms(end, final) < 4e-6


@pytest.mark.parametrize("schedule", ["chunked", "recurrent"])
def test_reverse_is_flipping_inputs_and_output(schedule):
    arrays, cfg = arrays_of("head", 37), GatedDeltaRuleConfig(schedule, 16)
    flipped = {n: x if n == "initial_state" else x[:, ::-1] for n, x in arrays.items()}
    (got, state), (want, final) = gated_delta_rule(**arrays, reverse=True, cfg=cfg), gated_delta_rule(**flipped, cfg=cfg)
    assert relative_rms(got, want[:, ::-1]) < 2e-6
    assert relative_rms(state, final) < 2e-6


@pytest.mark.parametrize("gate", ["head", "channel"])
def test_a_reset_forgets_exactly(gate):
    arrays = arrays_of(gate, 40)
    arrays["g"] = arrays["g"].at[:, 21].set(-jnp.inf)
    noise = {n: x.at[:, :21].add(0.7) if n in ("key", "value") else x for n, x in arrays.items()}
    run = functools.partial(gated_delta_rule, cfg=CHUNKED)
    np.testing.assert_array_equal(run(**noise)[0][:, 21:], run(**arrays)[0][:, 21:])


def test_orthogonal_keys_make_it_linear_attention():
    """Keys that never meet again predict nothing, so the error is the value."""
    arrays = DeltaCase("orthogonal", gate="head", time=16).arguments()[0]
    arrays["key"] = jnp.broadcast_to(jnp.eye(16)[None, :, None], arrays["key"].shape)
    beta = arrays.pop("beta")
    got, state = gated_delta_rule(**arrays, beta=beta, cfg=CHUNKED)
    want, final = recurrent(**(arrays | {"value": arrays["value"] * beta[..., None]}))
    assert relative_rms(got, want) < 2e-6
    assert relative_rms(state, final) < 2e-6


def test_beta_of_one_writes_what_is_then_read():
    arrays = DeltaCase("memory", time=24).arguments()[0] | {"beta": jnp.ones((2, 24, 2))}
    output, _ = gated_delta_rule(**(arrays | {"query": arrays["key"]}), softmax_scale=1.0, cfg=CHUNKED)
    assert relative_rms(output, arrays["value"]) < 2e-6


def test_beta_of_zero_writes_nothing_and_has_a_gradient():
    case = DeltaCase("idle", gate="head", beta_kind="zero", initial_state=True)
    got = case.evaluate(functools.partial(gated_delta_rule, cfg=CHUNKED))
    assert np.abs(got["dbeta"]).max() > 0.1
    assert np.abs(got["dvalue"]).max() == 0
