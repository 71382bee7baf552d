"""The operation through the executor: which platform and which config a call runs with."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import kernel_registry
from ejkernel._device import device_of
from ejkernel.kernels import _xla
from ejkernel.kernels._attention import AttentionConfig
from ejkernel.kernels._attention.packing import Packing
from ejkernel.modules.base import default_executor
from ejkernel.modules.operations.attention import Attention, attention
from ejkernel.ops import AutotunePolicy, ConfigCache, ConfigSelectorChain, Executor, Invocation, Tuner
from ejkernel.ops.config.codec import from_fields
from ejkernel.types.mask import MaskInfo

q = jax.random.normal(jax.random.key(0), (1, 32, 2, 8))
on_cpu = pytest.mark.skipif(device_of(()).backend != "cpu", reason="says what happens without a GPU")


@pytest.mark.parametrize("platform", [None, "auto", "xla"])
def test_platforms_that_always_work(platform):
    output = attention(q, q, q, dtype=None, platform=platform, return_weights=False)
    np.testing.assert_allclose(output, _xla.attention(q, q, q, dtype=None)[0], atol=1e-6)


@on_cpu
def test_a_named_platform_runs_or_says_why():
    with pytest.raises(ValueError, match=r"no implementation of 'attention' for platform 'cuda' here.*NVIDIA GPU"):
        attention(q, q, q, platform="cuda")


def test_the_heuristic_answers_and_an_explicit_config_wins():
    choice = default_executor().choose(Attention(), q, q, q, dtype=None, platform="xla")
    assert (str(choice.level), choice.config) == ("heuristics", AttentionConfig("direct", platform="xla"))
    cfg = AttentionConfig(block_q=8, block_k=4)
    assert default_executor().choose(Attention(), q, q, q, dtype=None, platform="xla", _cfg=cfg).config == cfg
    program = jax.jit(lambda q: attention(q, q, q, dtype=None, cfg=cfg)[0]).lower(q).as_text()
    assert "x8x4xf32>" in program  # a tile of 8 queries by 4 keys


def test_configs_and_platforms_that_do_not_go_together():
    with pytest.raises(ValueError, match="'xla' was asked for, but cfg is for platform 'cuda'"):
        attention(q, q, q, platform="xla", cfg=AttentionConfig("fused", platform="cuda"))
    with pytest.raises(ValueError, match="schedule 'fused' is of another platform's kernels"):
        attention(q, q, q, platform="xla", cfg=AttentionConfig("fused"))
    with pytest.raises(ValueError, match="schedule 'fused' is of another platform's kernels"):
        _xla.attention(q, q, q, cfg=AttentionConfig("fused"))


def test_candidates_are_tuned_and_checked():
    chain = ConfigSelectorChain(ConfigCache(), AutotunePolicy(True, "autotune", validate_backward=True), Tuner(1, 1))
    x = jnp.ones((1, 300, 2, 8))
    choice = Executor(chain).choose(
        Attention(),
        x,
        x,
        x,
        dtype=None,
        causal=True,
        attention_mask=jnp.ones((1, 300), bool),
        return_weights=False,
        platform="xla",
    )
    assert str(choice.level) == "autotune"
    assert choice.config.platform == "xla"


def test_stored_configs_are_checked_before_use():
    inv = Invocation.of(Attention(), q, q, q, dtype=None, platform="xla")
    assert Attention().check_cfg(inv, AttentionConfig("direct", platform="xla")) is None
    assert "fused" in Attention().check_cfg(inv, AttentionConfig("fused"))


def test_calls_of_similar_length_share_a_key():
    def key(length, **options):
        x = jnp.ones((1, length, 2, 8))
        return Invocation.of(Attention(), x, x, x, **options).key

    assert key(900) == key(1000)
    assert key(900) != key(2000)
    assert key(900) != key(900, causal=True)


def test_signatures_agree():
    entries = kernel_registry.list_implementations("attention")
    assert {str(entry.platform) for entry in entries} >= {"xla", "cuda"}
    kernel_registry.validate_signatures()


def test_platform_functions_always_return_the_pair():
    output, weights = _xla.attention(query=q, key=q, value=q, causal=True, cfg=AttentionConfig(block_q=8, block_k=8))
    assert (output.shape, weights.shape, output.dtype) == ((1, 32, 2, 8), (1, 2, 32, 32), jnp.bfloat16)


def test_new_packings_and_scales_as_arrays_do_not_compile_again(caplog):
    x = q[:, :30]
    ids = lambda first: np.repeat([[0, 1]], [first, 30 - first], axis=1).astype(np.int32)
    attention(x, x, x, mask_info=MaskInfo.from_segments(ids(9)), causal=True, softmax_scale=jnp.float32(0.1))
    with jax.log_compiles(), caplog.at_level("WARNING"):
        for first in range(1, 30):
            info = MaskInfo.from_segments(ids(first))
            attention(x, x, x, mask_info=info, causal=True, softmax_scale=jnp.float32(first))
        assert "Compiling" not in caplog.text


def test_packings_on_a_gpu_have_few_shapes():
    """Where cuDNN may read it, a packing's tables depend on lengths by bucket: 49 packings of two sequences in 50 tokens."""
    packings = [np.repeat([[0, 1]], [first, 50 - first], axis=1).astype(np.int32) for first in range(1, 50)]
    shapes = {tuple(x.shape for x in Packing.of(MaskInfo.from_segments(ids), 1)) for ids in packings}
    assert len(shapes) <= 6


def test_eager_calls_compile_once(caplog):
    fresh = q[:, :31]  # a shape that no other test calls with
    with jax.log_compiles(), caplog.at_level("WARNING"):
        attention(fresh, fresh, fresh, causal=True, return_weights=False)
        assert "Compiling" in caplog.text
        caplog.clear()
        for _ in range(3):
            attention(fresh, fresh, fresh, causal=True, return_weights=False)
        assert "Compiling" not in caplog.text


def test_configurations_keep_their_meaning():
    """By position, and as they were stored before there were warps and stages."""
    cfg = AttentionConfig("blockwise", 128, 256, "xla", "cpu")
    assert (cfg.platform, cfg.backend, cfg.num_warps) == ("xla", "cpu", None)
    stored = {"schedule": "blockwise", "block_q": 128, "block_k": 256, "platform": "xla", "backend": "cpu"}
    assert from_fields(AttentionConfig, stored) == cfg
