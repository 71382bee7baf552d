"""Softmax attention on TPUs: the shared cases with interpreted kernels, and what lowers for a TPU."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental.pallas import tpu as pltpu

from ejkernel import kernel_registry
from ejkernel.kernels._attention import AttentionConfig
from ejkernel.kernels._pallas._chips import interpreted
from ejkernel.modules import attention
from ejkernel.testing.attention_cases import CASES, AttentionCase
from ejkernel.testing.compare import assert_close
from ejkernel.types.mask import MaskInfo

QUICK = ("window-past-the-keys", "sinks", "packed", "bfloat16")
REFUSED = {
    *("one-key", "window-none"),
    *("mask-pairs", "mask-1-head", "mask-kv-heads", "mask-heads", "sinks-heads"),
    *("bias-1-head", "bias-kv-heads", "bias-heads", "bias-shared", "bias-keys", "bias-queries", "bias-rank-2", "soft-cap"),
    *("dropout", "dropout-everything", "bfloat16-sinks", "float16"),
    "decode",
}
SATURATED = "extreme"  # below
MORE = (
    AttentionCase("long", q_len=300, kv_len=700, window=(90, 60), soft_cap=3.0, sinks=("H", 2)),
    AttentionCase("blocks-without-keys", q_len=400, kv_len=130, window=(20, 0), sinks=(1,)),
    AttentionCase("narrow-and-wide", dtype="bfloat16", q_len=256, kv_len=256, channels=80, value_channels=128, causal=True),
    AttentionCase("soft-cap-beyond-all-scores", soft_cap=3.4e38, causal=True),
    AttentionCase("packed-soft-cap", segments="packed", soft_cap=2.0, sinks=("Hkv", 1), mask="keys", q_len=150, kv_len=150),
)  # fmt: skip
TAKEN = [case for case in (*CASES, *MORE) if case.name not in (*REFUSED, SATURATED)]


def entry():
    (found,) = (e for e in kernel_registry.list_implementations("attention") if str(e.platform) == "pallas")
    return found


def named(name: str) -> AttentionCase:
    return next(case for case in (*CASES, *MORE) if case.name == name)


def as_a_tpu_sees(case: AttentionCase) -> AttentionCase:
    """The same case without what another test has found out about it for another device."""
    return dataclasses.replace(case)


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=str(c), marks=[] if c.name in QUICK else [pytest.mark.slow]) for c in TAKEN]
)
def test_matches_reference(case):
    blocks = AttentionConfig("flash", 128, 128) if case in MORE else None
    with interpreted():
        assert entry().refusal(as_a_tpu_sees(case).problem) is None
        case.check(functools.partial(entry().function, cfg=blocks), weights=False)


def test_what_is_refused_says_why():
    with interpreted():
        refused = {case.name: entry().refusal(as_a_tpu_sees(case).problem) for case in CASES}
    assert {name for name, reason in refused.items() if reason is not None} == REFUSED
    assert all("xla" in reason for reason in refused.values() if reason is not None)


def test_elsewhere_than_on_a_tpu_it_says_so():
    q = jnp.ones((1, 8, 2, 16))
    with pytest.raises(ValueError, match="not on a TPU"):
        attention(q, q, q, platform="pallas")


@pytest.mark.long
def test_saturated_rows_keep_the_rounding_of_what_cancels():
    """Where one key has all the weight, dq and dk are differences of equal numbers: they stay at the rounding of these."""
    case = named(SATURATED)
    with interpreted():
        got = case.value_and_gradients(entry().function, weights=False)
    want = case.expected()
    exact = ("output", "value")
    assert_close({name: got[name] for name in exact}, {name: want[name] for name in exact}, case.tolerance)
    q, k, v = (np.abs(np.asarray(case.arrays[name], np.float64)).max() for name in ("query", "key", "value"))
    cancelled = 2**-20 * v * np.abs(case.d_output).max() * case.channels**0.5
    assert np.abs(got["query"] - want["query"]).max() < cancelled * k
    assert np.abs(got["key"] - want["key"]).max() < cancelled * q * case.q_len


@pytest.mark.slow
def test_memories_of_a_chip_are_simulated():
    case = dataclasses.replace(named("packed-soft-cap"), batch=1, heads=2, kv_heads=1)
    with interpreted(how=pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)):
        case.check(functools.partial(entry().function, cfg=AttentionConfig("flash", 128, 128)), weights=False)


@pytest.mark.long
def test_positions_that_do_not_count_tokens():
    """Causality over positions that run backwards keeps later tokens: what the kernel cannot say, and xla can."""
    case = named("packed")
    ids = jnp.asarray(np.arange(case.q_len) // 20, jnp.int32)[None]
    backwards = jnp.asarray(np.arange(case.q_len)[::-1].copy(), jnp.int32)[None]
    info = MaskInfo.from_segments(ids, q_positions=backwards)
    arrays = {name: x[:1] for name, x in case.arrays.items()}

    def loss(arrays, platform):
        call = functools.partial(attention, mask_info=info, causal=True, dtype=None, return_weights=False, platform=platform)
        return jnp.sum(call(**arrays) ** 2)

    want = jax.grad(loss)(arrays, "xla")
    with interpreted():
        got = jax.jit(jax.grad(loss), static_argnums=1)(arrays, "pallas")
    for name, x in want.items():
        np.testing.assert_allclose(got[name], x, rtol=1e-5, atol=1e-5)


def test_vmap_is_more_rows_of_the_batch():
    case = named("sinks")
    q, k, v = (case.arrays[name] for name in ("query", "key", "value"))
    with interpreted():
        call = functools.partial(attention, dtype=None, causal=True, return_weights=False, platform="pallas")
        many = jax.vmap(call, in_axes=(0, None, 0))(jnp.stack([q, -q]), k, jnp.stack([v, v]))
        folded = call(jnp.concatenate([q, -q]), jnp.concatenate([k, k]), jnp.concatenate([v, v]))
    np.testing.assert_allclose(many.reshape(folded.shape), folded, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("queries", "keys"), [(0, 20), (20, 0)])
def test_calls_without_queries_or_keys(queries, keys):
    q, k = jnp.ones((1, queries, 2, 8)), jnp.ones((1, keys, 2, 8))
    with interpreted():
        output, weights = attention(q, k, k, platform="pallas")
    np.testing.assert_array_equal(output, np.zeros(q.shape))
    assert weights.shape == (1, 2, queries, keys)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_lowers_for_a_tpu(dtype):
    case = AttentionCase(
        "tpu", dtype=dtype, q_len=512, kv_len=512, channels=128, value_channels=128, causal=True, sinks=("H", 1)
    )
    with interpreted(how=False):
        shapes = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in case.arrays.items()}
        loss = lambda arrays: (
            attention(**arrays, **case.options, return_weights=False, platform="pallas").astype(jnp.float32).sum()
        )
        program = export.export(jax.jit(jax.grad(loss)), platforms=["tpu"])(shapes).mlir_module()
    assert program.count("tpu_custom_call") >= 3  # forward, dq, dkv


def test_lowers_with_sixty_four_bits():
    """JAX's kernels mix integers of 32 and 64 bits then, which no TPU compiler takes."""
    ids = MaskInfo.from_segments(jnp.asarray(np.arange(40)[None] // 20, jnp.int32))
    with interpreted(how=False), jax.enable_x64(True):
        x = jax.ShapeDtypeStruct((1, 40, 2, 8), jnp.float32)
        loss = lambda q, k, v: attention(
            q, k, v, mask_info=ids, causal=True, dtype=None, return_weights=False, platform="pallas"
        ).sum()
        program = export.export(jax.jit(jax.grad(loss)), platforms=["tpu"])(x, x, x).mlir_module()
    assert program.count("tpu_custom_call") >= 2


def test_derivatives_that_the_kernels_do_not_have_say_so():
    x = jnp.ones((1, 20, 2, 8))
    call = lambda v: attention(x, x, v, return_weights=False, dtype=None, platform="pallas")
    with interpreted():
        with pytest.raises(TypeError, match="the pallas platform has reverse mode only"):
            jax.jvp(call, (x,), (x,))
        with pytest.raises(TypeError, match="the pallas platform's gradient has no derivative"):
            jax.eval_shape(jax.grad(lambda x: jnp.sum(jax.grad(lambda x: jnp.sum(call(x) ** 2))(x) ** 2)), x)


def test_float32_products_take_all_passes():
    """A float32 product of default precision is one of bfloat16 on a TPU, which interpreted kernels would not show."""
    case = AttentionCase("products", q_len=128, kv_len=128)
    with interpreted(how=False), jax.default_matmul_precision("bfloat16"):
        loss = lambda arrays: attention(**arrays, **case.options, return_weights=False, platform="pallas").sum()
        traced = str(jax.make_jaxpr(jax.grad(loss))(case.arrays))
    inside = [line for line in traced.splitlines() if "dot_general" in line or "precision=" in line]
    assert "precision=(Precision.HIGHEST, Precision.HIGHEST)" in traced.replace("\n", " ")
    assert not [line for line in inside if "precision=None" in line or "precision=(Precision.DEFAULT" in line]
