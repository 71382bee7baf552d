"""The operations under JAX's settings: 64 bits, strict promotion of dtypes, no promotion of ranks, no `jit`."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._attention import AttentionConfig
from ejkernel.modules import (
    GatedDeltaRuleConfig,
    RecurrentAttentionConfig,
    attention,
    causal_conv1d,
    gated_delta_rule,
    gla_attention,
    lightning_attention,
    recurrent_attention,
)
from ejkernel.ops import ConfigSelectorChain, Executor
from ejkernel.ops.compare import _errors
from ejkernel.testing.compare import assert_close, reference_settings, relative_rms
from ejkernel.testing.delta_cases import DeltaCase
from ejkernel.testing.linear_cases import LinearCase
from ejkernel.types.mask import MaskInfo
from tests.ops.toy import Cube

small = functools.partial(
    LinearCase, time=5, batch=1, heads=2, kv_heads=1, key_channels=3, value_channels=2, initial_state=True
)
SCHEDULES = {name: RecurrentAttentionConfig(name, 4) for name in ("chunked", "recurrent")}
CASES = [
    small("ungated"),
    small("g", gates=("g",)),
    small("added-gates", gates=("g4", "gk"), gates_per_kv_head=True),
    small("all-gates", gates=("g", "g_gamma", "gk", "gv"), reverse=True),
    small("packed", gates=("g", "g_gamma"), lengths=(3, 0, 5)),
    small("packed-rank3", gates=("gk",), lengths=(3, 0, 5), reverse=True, rank3=True),
]
LINEAR = [
    *((case, functools.partial(recurrent_attention, cfg=cfg)) for case in CASES for cfg in SCHEDULES.values()),
    (small("gla", gates=("g",)), gla_attention),
    (small("lightning"), functools.partial(lightning_attention, layer_idx=0, num_layers=2)),
]
delta = functools.partial(
    DeltaCase, time=9, batch=1, heads=2, key_heads=1, key_channels=3, value_channels=2, initial_state=True
)
DELTA = [
    delta("ungated", l2norm=True),
    delta("head", gate="head", reverse=True),
    delta("channel", gate="channel"),
    delta("packed", gate="head", lengths=(3, 0, 5)),
    delta("packed-rank3", gate="channel", lengths=(3, 0, 5), reverse=True, rank3=True),
]
OPTIONS = {
    "plain": {},
    "segments": {"mask_info": lambda: MaskInfo.from_segments(jnp.array([[0] * 4 + [1] * 5]))},
    "window": {"sliding_window": 2},
    "sinks": {"softmax_aux": lambda: jnp.ones((2, 2), jnp.bfloat16)},
    "dropout": {"dropout_rng": lambda: jax.random.key(0), "dropout_prob": 0.2, "deterministic": False},
    "bias": {"bias": lambda: jnp.ones(9, jnp.bfloat16)},
    "masks": {
        "attention_mask": lambda: jnp.ones((1, 2, 9, 9), bool),
        "mask_info": lambda: MaskInfo.from_attention_mask(jnp.ones((1, 4, 9, 9), bool)),
    },
    "softmax-dtype": {"softmax_dtype": jnp.bfloat16, "logits_soft_cap": 2.0},
}
ATTENTION = [AttentionConfig("direct"), AttentionConfig(block_q=4, block_k=4)]


def attention_call(cfg, options, dtype):
    given = {name: value() if callable(value) and not isinstance(value, type) else value for name, value in options.items()}
    return lambda query, key, value, scale: attention(
        query, key, value, causal=True, softmax_scale=scale, dtype=dtype, cfg=cfg, **given
    )


def attention_arrays(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(1), 3)
    rows = [jax.random.normal(key, (1, 9, heads, 4), dtype) for key, heads in zip(keys, (4, 2, 2), strict=True)]
    return {**dict(zip(("query", "key", "value"), rows, strict=True)), "scale": jnp.asarray(0.4, jnp.float32)}


def outputs_and_gradients(call, arrays):
    outputs, pull = jax.vjp(lambda arrays: call(**arrays), arrays)
    return outputs, pull(jax.tree.map(lambda x: jnp.ones(x.shape, x.dtype), outputs))[0]


@pytest.fixture(params=["dtypes", "dtypes in 64 bits", "ranks"])
def no_promotion(request):
    dtypes, ranks = jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise")
    with ranks if request.param == "ranks" else dtypes, jax.enable_x64(request.param.endswith("64 bits")):
        yield


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("case", "operation"), LINEAR, ids=[f"{n}-{case}" for n, (case, _) in enumerate(LINEAR)])
def test_linear_operations_promote_nothing(no_promotion, case, operation, dtype):
    arrays, options = LinearCase(**{**vars(case), "dtype": dtype}).arguments()
    run = functools.partial(operation, return_state=True, **(options if case.lengths or case.reverse else {}))
    jax.eval_shape(functools.partial(outputs_and_gradients, run), arrays)


def delta_call(case, schedule):
    return functools.partial(gated_delta_rule, return_state=True, cfg=GatedDeltaRuleConfig(schedule, 4), **case.arguments()[1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("case", DELTA, ids=str)
def test_the_delta_rule_promotes_nothing(no_promotion, case, schedule, dtype):
    arrays, _ = dataclasses.replace(case, dtype=dtype).arguments()
    jax.eval_shape(functools.partial(outputs_and_gradients, delta_call(case, schedule)), arrays)


def test_inputs_of_several_dtypes_promote_nothing(no_promotion):
    x = jnp.ones((1, 6, 4))
    convolution = {"x": x, "weight": x[0, :3], "bias": x[0, 0], "initial_state": x[:, :2]}
    calls = [
        (functools.partial(causal_conv1d, activation="silu", return_state=True), convolution),
        *(
            (functools.partial(recurrent_attention, return_state=True, cfg=cfg), CASES[3].arguments()[0])
            for cfg in SCHEDULES.values()
        ),
        *((delta_call(DELTA[2], schedule), DELTA[2].arguments()[0]) for schedule in SCHEDULES),
    ]
    for operation, arrays in calls:
        for first in range(3):
            dtypes = itertools.islice(itertools.cycle(("float32", "bfloat16", "float16")), first, None)
            given = {name: array.astype(dtype) for (name, array), dtype in zip(arrays.items(), dtypes, strict=False)}
            jax.eval_shape(functools.partial(outputs_and_gradients, operation), given)


@pytest.mark.parametrize("dtype", [None, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("cfg", ATTENTION, ids=["direct", "blockwise"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_attention_promotes_nothing(no_promotion, options, cfg, dtype):
    jax.eval_shape(functools.partial(outputs_and_gradients, attention_call(cfg, options, dtype)), attention_arrays())


def test_attention_names_the_dtypes_that_strict_promotion_does_not_join():
    x = jnp.ones((1, 3, 1, 4))
    narrow = x.astype(jnp.bfloat16)
    message = r"query, key and value must be of one dtype when dtype is None .*'strict'.*; got float32, bfloat16 and float32\."
    with jax.numpy_dtype_promotion("strict"):
        with pytest.raises(TypeError, match=message):
            attention(x, narrow, x, dtype=None)
        assert attention(x, narrow, x, dtype=jnp.float32, return_weights=False).dtype == jnp.float32
    assert attention(x, narrow, x, dtype=None, return_weights=False).dtype == jnp.float32


@pytest.mark.long
@pytest.mark.parametrize("options", ["segments", "dropout"])
def test_blockwise_attention_without_jit(options):
    call, arrays = attention_call(ATTENTION[1], OPTIONS[options], None), attention_arrays()
    want = jax.jit(functools.partial(outputs_and_gradients, call))(arrays)
    with jax.disable_jit():
        got = outputs_and_gradients(call, arrays)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, want)


@pytest.mark.long
def test_a_linear_operation_without_jit():
    case = CASES[4]
    with jax.disable_jit():
        got = case.evaluate(functools.partial(recurrent_attention, return_state=True, cfg=SCHEDULES["chunked"]), jit=False)
    assert_close(got, case.expected(), case.tolerance)


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "schedule"), [(DELTA[4], "chunked"), (DELTA[1], "recurrent"), (delta("no-tokens", time=0), "chunked")]
)
def test_the_delta_rule_without_jit(case, schedule):
    with jax.disable_jit():
        got = case.evaluate(delta_call(case, schedule), jit=False)
    assert_close(got, case.expected(), case.tolerance)


def test_a_kernel_with_its_own_gradient_without_jit():
    executor = Executor(ConfigSelectorChain())
    with jax.disable_jit():
        assert float(jax.grad(lambda x: executor(Cube(), x, jnp.asarray(2)))(1.5)) == 30 * 1.5**2 * 2
        with pytest.raises(TypeError, match="pass 'x' by position"):
            jax.grad(lambda x: executor(Cube(), x=x, n=2))(1.0)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_sixty_four_bits(case, dtype):
    wide = LinearCase(**{**vars(case), "dtype": dtype})
    for schedule in ("chunked", "recurrent")[: 2 if case.lengths else 1]:
        with jax.enable_x64(True):
            got = wide.evaluate(functools.partial(recurrent_attention, return_state=True, cfg=SCHEDULES[schedule]))
            assert_close(got, wide.expected(), wide.tolerance)


def test_lightning_decays_are_as_wide_as_the_query():
    with jax.enable_x64(True):
        arrays, _ = small("lightning", heads=3, kv_heads=3, dtype="float64").arguments()
        got = lightning_attention(**arrays, layer_idx=1, num_layers=7, return_state=True)
        decay = -(8 / 3 * (1 - 1 / 7)) * np.arange(3.0)
        want = recurrent_attention(**arrays, g_gamma=decay, return_state=True)
    assert all(relative_rms(x, y) < 1e-15 for x, y in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("options", ["segments", "window", "sinks", "dropout"])
def test_attention_in_sixty_four_bits(options, dtype):
    with jax.enable_x64(True):
        arrays = attention_arrays(dtype)
        got, want = (jax.jit(functools.partial(outputs_and_gradients, attention_call(cfg, OPTIONS[options], None)))(arrays)
                     for cfg in reversed(ATTENTION))  # fmt: skip
        assert got[0][0].dtype == dtype
        limit = 1e-12 if dtype == "float64" else 1e-5
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=limit, atol=limit), got, want)


def test_tuning_compares_16_bit_results_under_strict_promotion():
    x = jnp.full((3, 2), 2.0, jnp.bfloat16)
    with jax.numpy_dtype_promotion("strict"):
        unequal, largest, _ = _errors(x, x * 1.5)
    assert not unequal
    assert float(largest) == 0.5


def test_references_are_computed_on_the_cpu():
    settings: Any = jax.config  # whose attributes come from flags, which type checkers do not see
    with reference_settings():
        assert settings.jax_default_device == jax.local_devices(backend="cpu")[0]
