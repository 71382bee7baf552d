"""Random shapes and options against the reference, and laws that hold whatever the numbers are."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ejkernel.kernels._linear import LinearConfig
from ejkernel.modules import gla_attention, lightning_attention, recurrent_attention
from ejkernel.testing.compare import assert_close, relative_rms
from ejkernel.testing.linear_cases import GATE_KINDS, LinearCase

slow = functools.partial(settings, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@st.composite
def cases(draw) -> LinearCase:
    kv_heads = draw(st.integers(1, 2))
    gates = draw(st.sets(st.sampled_from(["g", "g4", "g_gamma", "gk", "gv"])))
    gates = tuple(sorted(gates - ({"g4"} if "g" in gates else set())))
    packed = draw(st.booleans())
    lengths = tuple(draw(st.lists(st.integers(0, 40), min_size=1, max_size=5))) if packed else None
    return LinearCase(
        "drawn",
        batch=draw(st.integers(1, 3)),
        time=draw(st.integers(0, 300)),
        heads=kv_heads * draw(st.integers(1, 2)),
        kv_heads=kv_heads,
        key_channels=draw(st.integers(1, 20)),
        value_channels=draw(st.integers(1, 20)),
        gates=gates,
        gate_kind=draw(st.sampled_from(sorted(GATE_KINDS))),
        gates_per_kv_head=draw(st.booleans()),
        initial_state=draw(st.booleans()),
        lengths=lengths,
        rank3=packed and draw(st.booleans()),
        reverse=draw(st.booleans()),
        scale=draw(st.sampled_from([None, 1.0, -0.3])),
        dtype=draw(st.sampled_from(["float32", "float32", "bfloat16", "float16"])),
        seed=draw(st.integers(0, 1000)),
    )


@slow(max_examples=7)
@given(cases(), st.sampled_from([LinearConfig("chunked", 16), LinearConfig("chunked", 64), LinearConfig("recurrent", 4), None]))
def test_any_call_matches_the_reference(case, cfg):
    got = case.evaluate(functools.partial(recurrent_attention, return_state=True, cfg=cfg))
    assert_close(got, case.expected(), case.tolerance)


def arrays_of(seed: int, time: int, dtype=jnp.float32) -> dict:
    return LinearCase("law", time=time, gates=("gk",), initial_state=True, seed=seed).arguments()[0]


@slow(max_examples=5)
@given(st.integers(0, 99), st.integers(0, 40), st.integers(0, 40))
def test_a_sequence_may_be_cut_anywhere(seed, first, second):
    arrays = arrays_of(seed, first + second)
    cut = lambda part: {n: x if n == "initial_state" else x[:, part] for n, x in arrays.items()}
    whole, final = recurrent_attention(**arrays, return_state=True)
    left, state = recurrent_attention(**cut(slice(None, first)), return_state=True)
    right, end = recurrent_attention(**(cut(slice(first, None)) | {"initial_state": state}), return_state=True)
    assert relative_rms(jnp.concatenate([left, right], 1), whole) < 4e-6
    assert relative_rms(end, final) < 4e-6


@slow(max_examples=5)
@given(st.integers(0, 99), st.integers(1, 50))
def test_reverse_is_flipping_inputs_and_output(seed, time):
    arrays = arrays_of(seed, time)
    flipped = {n: x if n == "initial_state" else x[:, ::-1] for n, x in arrays.items()}
    got, state = recurrent_attention(**arrays, reverse=True, return_state=True)
    want, final = recurrent_attention(**flipped, return_state=True)
    np.testing.assert_array_equal(got, want[:, ::-1])
    np.testing.assert_array_equal(state, final)


@slow(max_examples=5)
@given(st.integers(0, 99), st.integers(2, 60), st.integers(0, 59))
def test_a_reset_forgets_exactly(seed, time, at):
    at = at % time
    arrays = arrays_of(seed, time)
    arrays["gk"] = arrays["gk"].at[:, at].set(-jnp.inf)
    noise = {n: x.at[:, :at].add(7.0) if n in ("key", "value") else x for n, x in arrays.items()}
    got, want = recurrent_attention(**noise), recurrent_attention(**arrays)
    np.testing.assert_array_equal(got[:, at:], want[:, at:])


@slow(max_examples=3)
@given(st.integers(0, 99), st.integers(1, 40))
def test_the_operations_are_one_recurrence(seed, time):
    a = LinearCase("one", time=time, heads=4, kv_heads=4, gates=("g",), seed=seed).arguments()[0]
    q, k, v, g = (a[n] for n in ("query", "key", "value", "g"))
    np.testing.assert_array_equal(gla_attention(q, k, v, g), recurrent_attention(q, k, v, g))
    gamma = -(8 / 4 * (1 - 2 / 6)) * jnp.arange(4.0)
    light = lightning_attention(q, k, v, layer_idx=2, num_layers=6)
    assert relative_rms(light, recurrent_attention(q, k, v, g_gamma=gamma)) < 1e-6
