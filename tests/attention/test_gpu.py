"""cuDNN attention on an NVIDIA GPU: everything `supports` says it covers, against the float64 reference."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel._device import device_of
from ejkernel.kernels._cuda import attention as cuda_attention
from ejkernel.modules.base import default_executor
from ejkernel.modules.operations.attention import Attention, attention
from ejkernel.testing.attention_cases import AttentionCase
from ejkernel.testing.compare import relative_rms
from ejkernel.types.mask import MaskInfo

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(device_of(()).backend != "gpu", reason="needs an NVIDIA GPU"),
]

Case = functools.partial(AttentionCase, dtype="bfloat16", q_len=96, kv_len=96, channels=64, value_channels=64)
CASES = [
    Case("plain"),
    Case("causal", causal=True),
    Case("causal-float16", causal=True, dtype="float16"),
    Case("multi-head", kv_heads=4, causal=True),
    Case("multi-query", kv_heads=1, causal=True),
    Case("odd-lengths", q_len=77, kv_len=101, causal=True),
    Case("odd-lengths-all-seen", q_len=77, kv_len=101),
    Case("odd-lengths-more-queries", q_len=101, kv_len=77, causal=True),
    Case("odd-lengths-window", q_len=77, kv_len=101, window=(9, 0)),
    Case("more-keys", q_len=40, kv_len=130, causal=True),
    Case("one-query", q_len=1),
    Case("wide", channels=128, value_channels=128, causal=True),
    Case("narrow", channels=8, value_channels=8),
    Case("scale", scale=0.05),
    Case("window", window=(9, 0)),
    Case("window-causal", window=(20, 5), causal=True),
    Case("mask-keys", mask="keys"),
    Case("mask-pairs", mask="pairs"),
    Case("mask-kv-heads", mask=2, causal=True),
    Case("mask-heads", mask=4),
    Case("bias-heads", bias=(1, "H", "T", "S"), causal=True),
    Case("bias-batch", bias=("B", "H", "T", "S")),
    Case("bias-shared", bias=(1, 1, "T", "S")),
    Case("bias-kv-heads", bias=("B", "Hkv", "T", "S"), mask="pairs"),
    Case("bias-keys", bias=("B", 1, 1, "S")),
    Case("packed", segments="packed"),
    Case("packed-causal", segments="packed", causal=True),
    Case("packed-window", segments="packed", causal=True, window=(6, 0)),
    Case("packed-mask", segments="packed", causal=True, mask="keys"),
    Case("decode", segments="decode", q_len=4, kv_len=96, causal=True),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_reference(case: AttentionCase):
    assert cuda_attention.supports(case.problem) is None
    case.check(cuda_attention)


def test_traced_segments():
    case = Case("packed-causal-traced", segments="packed", causal=True)
    q, k, v = (case.arrays[name] for name in ("query", "key", "value"))
    run = jax.jit(lambda q, k, v, info: cuda_attention(q, k, v, mask_info=info, causal=True, dtype=None)[0])
    output = np.asarray(run(q, k, v, case.mask_info).astype(jnp.float32))
    assert relative_rms(output, case.reference.output) < 6e-3


def test_auto_takes_cudnn_where_it_covers_the_call():
    q = jnp.ones((1, 256, 4, 64), jnp.bfloat16)
    chosen = lambda *args, **options: default_executor().choose(Attention(), *args, **options).config
    assert chosen(q, q, q, causal=True).platform == "cuda"
    assert chosen(q[:, :1], q, q).platform == "triton"  # faster there
    assert chosen(q, q, q, softmax_dtype=jnp.bfloat16).platform == "xla"
    for options in ({"logits_soft_cap": 3.0}, {"dtype": jnp.float32}, {"bias": jnp.zeros((1, 4, 256, 256), jnp.bfloat16)}):
        assert chosen(q, q, q, causal=True, **options).platform == "triton"
        output = attention(q, q, q, causal=True, return_weights=False, **options)
        np.testing.assert_allclose(output.astype(jnp.float32), 1, rtol=1e-2)
    with pytest.raises(ValueError, match="float16 and bfloat16"):
        attention(q, q, q, dtype=jnp.float32, platform="cuda")


def test_vmap_over_all_operands():
    case = Case("vmapped", causal=True)
    stacked = [jnp.stack([case.arrays[name]] * 3) for name in ("query", "key", "value")]
    run = functools.partial(cuda_attention, causal=True, dtype=None)
    output = np.asarray(jax.vmap(lambda *x: run(*x)[0])(*stacked)[2].astype(jnp.float32))
    assert relative_rms(output, case.reference.output) < 6e-3


def test_long_blockwise_on_xla():
    q, k, v = (jax.random.normal(jax.random.key(n), (1, 3000, 4, 64), jnp.float32) for n in range(3))
    chosen = default_executor().choose(Attention(), q, k, v, causal=True, dtype=None, platform="xla")
    assert chosen.config.schedule == "blockwise"
    got = attention(q, k, v, causal=True, dtype=None, return_weights=False, platform="xla")
    want = jax.nn.dot_product_attention(*(x.astype(jnp.float32) for x in (q, k, v)), is_causal=True)
    assert relative_rms(np.asarray(got), np.asarray(want)) < 2e-3  # the other side computes in TF32


def test_a_mask_info_of_one_row_serves_the_batch():
    case = Case("shared", causal=True)
    ids = np.repeat(np.array([[0, 1]], np.int32), 48, 1)
    run = functools.partial(cuda_attention, **case.arrays, causal=True, dtype=None)
    one = run(mask_info=MaskInfo.from_segments(ids))[0]
    both = run(mask_info=MaskInfo.from_segments(ids.repeat(2, 0)))[0]
    np.testing.assert_array_equal(one, both)
