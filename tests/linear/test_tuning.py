"""The linear operations choose their configuration through the executor."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import ops
from ejkernel.kernels._linear import LinearConfig
from ejkernel.modules import GLAttention, GLAttentionConfig, RecurrentAttention, gla_attention, recurrent_attention
from ejkernel.modules.base import default_executor
from ejkernel.ops import Invocation
from ejkernel.testing.compare import relative_rms
from ejkernel.testing.linear_cases import LinearCase


def invocation(**changes) -> Invocation:
    arrays, options = LinearCase("tuned", **({"time": 12, "gates": ("gk",)} | changes)).arguments()
    return Invocation.of(RecurrentAttention(), **arrays, **options)


def test_without_a_measurement_the_heuristic_answers_on_a_cpu():
    arrays, options = LinearCase("untuned", time=12, gates=("g4",)).arguments()
    choice = default_executor().choose(GLAttention(), **arrays, **options, platform="xla")
    assert isinstance(choice.config, GLAttentionConfig)
    assert choice.config.platform == "xla"
    assert str(choice.level) in ("heuristics", "autotune")


def test_candidates_are_alternatives_that_run_and_agree():
    inv = invocation(time=40)
    configs = list(RecurrentAttention().candidate_cfgs(inv))
    assert len(set(configs)) == len(configs) > 3
    assert {cfg.schedule for cfg in configs} == {"chunked", "recurrent"}
    arrays, options = LinearCase("tuned", time=40, gates=("gk",)).arguments()
    want = recurrent_attention(**arrays, **options)
    for cfg in configs:
        assert RecurrentAttention().check_cfg(inv, cfg) is None
        assert relative_rms(recurrent_attention(**arrays, **options, cfg=cfg), want) < 2e-6


@pytest.mark.parametrize(("time", "measured"), [(1, "forward"), (16, "forward"), (17, "forward+backward")])
def test_steps_of_a_decoder_are_tuned_for_the_step_alone(time, measured):
    tuned = ops.Tuner(warmup=1, iters=1).tune(invocation(time=time), validate_backward=True)
    assert tuned.record["measured"] == measured


def test_varying_lengths_share_few_keys():
    keys = {invocation(time=t).key for t in range(1, 200)}
    assert len(keys) < 20
    assert invocation(time=100).key != invocation(time=100, key_channels=32).key
    assert invocation().key != invocation(reverse=True).key
    assert invocation().key != invocation(gates=("g",)).key
    assert invocation().key != invocation(dtype="bfloat16").key


def test_tuning_ahead_finds_the_call_inside_jit_scan_and_grad():
    arrays, _ = LinearCase("ahead", time=12, heads=1, kv_heads=1, gates=("g4",)).arguments()
    q, k, v, g = (arrays[name] for name in ("query", "key", "value", "g"))

    @jax.jit
    def step(q):
        layer = lambda x, _: (gla_attention(x, k, v, g), None)
        return jax.grad(lambda q: jnp.sum(jax.lax.scan(layer, q, None, length=2)[0] ** 2))(q)

    before, equations = step(q), len(jax.make_jaxpr(step)(q).eqns)
    ops.tune(step, q)
    choice = default_executor().choose(GLAttention(), q, k, v, g, platform=None)
    assert str(choice.level) in ("memory", "disk", "autotune")
    assert choice.config in [GLAttentionConfig(schedule, 16, platform="xla") for schedule in ("chunked", "recurrent")]
    assert any(line.startswith("gla ") for line in str(ops.report()).splitlines())
    assert any("route: chunks of" in str(line) for line in str(ops.report()).splitlines())
    assert len(jax.make_jaxpr(step)(q).eqns) == equations
    np.testing.assert_allclose(step(q), before, rtol=1e-4, atol=1e-5)


def test_an_explicit_config_wins_and_is_used_as_given():
    arrays, options = LinearCase("explicit", time=12).arguments()
    cfg = LinearConfig("chunked", 4)
    text = jax.jit(lambda a: recurrent_attention(**a, **options, cfg=cfg)).lower(arrays).as_text()
    assert "tensor<2x2x3x4x4xf32>" in text  # scores of three chunks of four tokens
    other = jax.jit(lambda a: recurrent_attention(**a, **options, cfg=LinearConfig("recurrent", 4))).lower(arrays).as_text()
    assert "x4x4xf32>" not in other


@pytest.mark.parametrize("field", ["schedule", "block_q"])
def test_every_field_changes_what_runs(field):
    arrays, _ = LinearCase("fields", time=16).arguments()
    changed = {"schedule": LinearConfig("recurrent", 8), "block_q": LinearConfig("chunked", 4)}[field]
    program = lambda cfg: jax.jit(lambda a: recurrent_attention(**a, cfg=cfg)).lower(arrays).as_text()
    assert program(LinearConfig("chunked", 8)) != program(changed)
