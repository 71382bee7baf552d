"""The delta rule on TPUs: the shared cases with interpreted kernels, and what lowers for a TPU."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.pallas import tpu as pltpu

from ejkernel import kernel_registry
from ejkernel.kernels._delta import DeltaProblem, GatedDeltaRuleConfig
from ejkernel.kernels._pallas._chips import interpreted
from ejkernel.modules import gated_delta_rule
from ejkernel.testing.compare import assert_close
from ejkernel.testing.delta_cases import CASES, DeltaCase

SHORT = GatedDeltaRuleConfig("chunked", 16)  # which compile faster
STEPS = GatedDeltaRuleConfig("recurrent", 16)
# Cases of the same shapes compile once. These two shapes go through every line of the kernels.
QUICK = [case for case in CASES if case.name.startswith(("head-", "channel-")) and not case.amplifies]
REFUSED = {case.name for case in CASES if case.dtype == "float16"}


def entry():
    (found,) = (e for e in kernel_registry.list_implementations("gated_delta_rule") if str(e.platform) == "pallas")
    return found


@functools.cache
def with_config(cfg: GatedDeltaRuleConfig | None):
    """One object for each config, so that cases of the same shapes compile once."""
    return functools.partial(entry().function, cfg=cfg)


def named(name: str) -> DeltaCase:
    return next(case for case in CASES if case.name == name)


@pytest.mark.parametrize("case", QUICK, ids=str)
def test_every_gate_in_short_chunks(case):
    with interpreted():
        assert_close(case.evaluate(with_config(SHORT)), case.expected(), case.tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in CASES if case.name not in REFUSED], ids=str)
def test_matches_reference(case):
    with interpreted():
        assert_close(case.evaluate(with_config(None)), case.expected(), case.tolerance)


def test_what_is_refused_says_why():
    with interpreted():
        reasons = {case.name: entry().refusal(case.problem) for case in CASES}
        wide = jax.ShapeDtypeStruct((1, 32, 2, 512), jnp.bfloat16)
        problem = jax.eval_shape(DeltaProblem.from_arguments, wide, wide, wide, jax.ShapeDtypeStruct((1, 32, 2), jnp.bfloat16))
        assert "256" in (entry().refusal(problem) or "")
        block = entry().function.refuses(named("head").problem, GatedDeltaRuleConfig("chunked", 256))
        steps = entry().function.refuses(named("head").problem, STEPS)
    assert {name for name, reason in reasons.items() if reason is not None} == REFUSED
    assert "block_q must be a power of two from 16 to 128" in block
    assert "up to 16 tokens" in steps


@pytest.mark.parametrize(
    ("gate", "reverse"), [("head", False), ("channel", True), pytest.param(None, False, marks=pytest.mark.long)]
)
def test_a_few_tokens_step_by_step(gate, reverse):
    case = DeltaCase("steps", time=3, key_heads=1, gate=gate, reverse=reverse, initial_state=True, l2norm=True)
    with interpreted():
        got = case.values(with_config(STEPS))
    want = case.expected()
    assert_close(got, {name: want[name] for name in got}, case.tolerance)


@pytest.mark.long
def test_the_gradient_of_calls_that_went_step_by_step():
    case = DeltaCase("steps", time=3, gate="channel", initial_state=True)
    with interpreted():
        assert_close(case.evaluate(with_config(STEPS)), case.expected(), case.tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("gate", ["head", "channel"])
def test_memories_of_a_chip_are_simulated(gate):
    case = DeltaCase("simulated", gate=gate, lengths=(20, 0, 5), initial_state=True)
    with interpreted(how=pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)):
        function = functools.partial(entry().function, cfg=SHORT)  # its own: a plan says how it is interpreted
        assert_close(case.evaluate(function), case.expected(), case.tolerance)


@pytest.mark.long
def test_vmap_is_a_larger_batch():
    case = DeltaCase("mapped", time=20, gate="head")
    arrays, _ = case.arguments()
    twice = {name: jnp.stack([x, x[::-1]]) for name, x in arrays.items()}
    with interpreted():
        call = lambda arrays: gated_delta_rule(**arrays, platform="pallas")
        many, (one, other) = jax.vmap(call)(twice), (call({n: x[i] for n, x in twice.items()}) for i in range(2))
    np.testing.assert_allclose(many, jnp.stack([one, other]), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("lengths", [None, (11, 0, 7)], ids=["dense", "packed"])
def test_a_gradient_promotes_nothing_and_leaks_nothing(lengths):
    arrays, options = DeltaCase("strict", batch=1, time=18, lengths=lengths, gate="head", dtype="bfloat16").arguments()
    output = lambda arrays: gated_delta_rule(**arrays, **options, platform="pallas")
    pulled = lambda arrays: jax.vjp(output, arrays)[1](output(arrays))
    with interpreted(), jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"), jax.check_tracer_leaks():
        jax.jit(pulled).trace(arrays)


@pytest.mark.parametrize("gate", [None, "head", "channel"])
def test_lowers_for_a_tpu(gate):
    case = DeltaCase("tpu", time=128, heads=4, key_channels=128, value_channels=128, gate=gate, dtype="bfloat16")
    arrays, _ = case.arguments()
    shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}
    loss = lambda arrays: gated_delta_rule(**arrays, platform="pallas").astype(jnp.float32).sum()
    with interpreted(how=False):
        program = export.export(jax.jit(jax.grad(loss)), platforms=["tpu"])(shapes).mlir_module()
    assert program.count("tpu_custom_call") >= 2  # forward, backward
