"""Bad input is refused with the argument's name, what is legal and what came."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._linear import LinearConfig
from ejkernel.modules import gla_attention, lightning_attention, recurrent_attention

B, T, H, K, V = 2, 6, 4, 8, 5
one = lambda *shape, dtype=jnp.float32: jnp.ones(shape, dtype)
q, k, v = one(B, T, H, K), one(B, T, H, K), one(B, T, H, V)
row = {"query": one(1, T, H, K), "key": one(1, T, H, K), "value": one(1, T, H, V)}
dense = {"query": q, "key": k, "value": v}

WRONG = [
    (dense | {"query": one(T, H, K)}, ValueError, "query must be [batch, time, heads, channels] (rank 3 needs cu_seqlens); got [6, 4, 8]."),
    (dense | {"query": one(B, T, H, K, 1)}, ValueError, "query must be [batch, time, heads, channels]; got [2, 6, 4, 8, 1]."),
    (dense | {"key": one(B, T + 1, H, K)}, ValueError, "key must be [2, 6, kv heads, 8]"),
    (dense | {"key": one(B, T, H, K + 1)}, ValueError, "got [2, 6, 4, 9]"),
    (dense | {"value": one(B, T, 2, V)}, ValueError, "value must be [2, 6, 4, value channels]"),
    (dense | {"query": one(B, T, 1, K), "key": one(B, T, 1, K)}, ValueError, "got [2, 6, 4, 5]. Where heads of values share them, repeat query and key: jnp.repeat(x, 4, axis=2)."),
    (dense | {"key": one(B, T, 2, K)}, ValueError, "got [2, 6, 4, 5]. Where heads of values share them, repeat key: jnp.repeat(x, 2, axis=2)."),
    (dense | {"key": one(B, T, 3, K), "value": one(B, T, 3, V)}, ValueError, "key must have a number of heads that divides query's 4; got 3."),
    (dense | {"query": one(B, T, H, K, dtype=jnp.int32)}, TypeError, "query must be float32, bfloat16, float16 or float64; got int32."),
    (dense | {"query": None}, TypeError, "query must be an array; got None."),
    (dense | {"g": one(B, T)}, ValueError, "g must be [2, 6, 4] (batch, time, heads) or [2, 6, 4, 8]"),
    (dense | {"g": one(B, T, H + 1)}, ValueError, "g must be [2, 6, 4]"),
    (dense | {"g": one(B, T, H, V)}, ValueError, "g must be [2, 6, 4, 8] (batch, time, heads, key channels) to match query; got [2, 6, 4, 5]."),
    (dense | {"g": one(B, T, H, dtype=jnp.int32)}, TypeError, "g must be float32"),
    (dense | {"gk": one(B, T, H, V)}, ValueError, "gk must be [2, 6, 4, 8] (batch, time, heads, key channels) to match query; got [2, 6, 4, 5]."),
    (dense | {"gv": one(B, T, H, K)}, ValueError, "gv must be [2, 6, 4, 5] (batch, time, heads, value channels) to match query; got [2, 6, 4, 8]."),
    (dense | {"g_gamma": one(3, H)}, ValueError, "g_gamma must be [4] (heads), [1, 4] or [2, 4] (sequences, heads); got [3, 4]."),
    (dense | {"initial_state": one(H, K, V)}, ValueError, "initial_state must be [2, 4, 8, 5]"),
    (dense | {"initial_state": one(B, H, K, V, dtype=jnp.int8)}, TypeError, "initial_state must be float32"),
    (dense | {"cu_seqlens": jnp.array([0, T])}, ValueError, "query must have a batch of 1 when cu_seqlens packs the sequences; got [2, 6, 4, 8]."),
    (row | {"cu_seqlens": jnp.array([0.0, T])}, TypeError, "cu_seqlens must be int32 or int64; got float32."),
    (row | {"cu_seqlens": jnp.array([0])}, ValueError, "cu_seqlens must be [sequences + 1] with at least one sequence; got [1]."),
    (row | {"cu_seqlens": jnp.array([[0, T]])}, ValueError, "cu_seqlens must be [sequences + 1]"),
    (row | {"cu_seqlens": jnp.array([1, T])}, ValueError, "cu_seqlens must start at 0; got 1 first."),
    (row | {"cu_seqlens": jnp.array([0, 4, 3, T])}, ValueError, "cu_seqlens must not decrease; got 4 before 3 at index 2."),
    (row | {"cu_seqlens": jnp.array([0, T + 1])}, ValueError, "cu_seqlens must end at the number of tokens, 6; got 7 last."),
    ({n: x[0] for n, x in row.items()} | {"cu_seqlens": jnp.array([0, T]), "gk": one(1, T, H, K)}, ValueError, "gk must be of rank 3, without the batch"),
    (row | {"cu_seqlens": [0, [1, 2]]}, TypeError, "cu_seqlens must be an array; got [0, [1, 2]]"),
    (row | {"cu_seqlens": [0, 2**40]}, ValueError, "cu_seqlens must end at the number of tokens, 6; got 1099511627776 last."),
    (row | {"cu_seqlens": np.array([0, 2**40])}, ValueError, "cu_seqlens must end at the number of tokens, 6; got 1099511627776 last."),
    (dense | {"query": [1, [2, 3]]}, TypeError, "query must be an array; got [1, [2, 3]]"),
    (dense | {"g": "a"}, TypeError, "g must be an array; got 'a'"),
    (dense | {"softmax_scale": one(2)}, ValueError, "softmax_scale must be a number or a scalar array; got float32[2]."),
    (dense | {"softmax_scale": "large"}, TypeError, "softmax_scale must be a number; got 'large'."),
    (dense | {"softmax_scale": "1.5"}, TypeError, "softmax_scale must be a number; got '1.5'."),
    (dense | {"softmax_scale": np.ones(1)}, ValueError, "softmax_scale must be a number or a scalar array; got float32[1]."),
    (dense | {"reverse": "yes"}, TypeError, "reverse must be True or False"),
    (dense | {"platform": "cudnn"}, ValueError, "platform must be one of 'triton', 'pallas', 'cuda', 'xla', 'auto' or None; got 'cudnn'."),
    (dense | {"cfg": {"block_q": 64}}, TypeError, "cfg"),
    (dense | {"cfg": LinearConfig(platform="triton"), "platform": "xla"}, ValueError, "platform 'xla' was asked for, but cfg is for platform 'triton'."),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "error", "message"), WRONG, ids=range(len(WRONG)))
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        recurrent_attention(**arguments)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schedule": "parallel"}, "schedule must be 'chunked' or 'recurrent'; got 'parallel'."),
        ({"block_q": 48}, "block_q must be a power of two from 1 to 1024"),
        ({"block_q": 0}, "got 0."),
        ({"block_q": 2048}, "got 2048."),
        ({"block_q": 16.0}, "got 16.0."),
        ({"block_q": True}, "got True."),
        ({"num_warps": 4.0}, "num_warps must be None or one of 1, 2, 4, 8, 16; got 4.0."),
        ({"num_stages": True}, "num_stages must be None or one of 1, 2, 3, 4, 5, 6; got True."),
        ({"platform": "fast"}, "platform must be one of"),
        ({"backend": "fpga"}, "backend must be one of"),
    ],
)
def test_wrong_configs(fields, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        LinearConfig(**fields)


def test_a_platform_that_is_not_here_says_why():
    with pytest.raises(ValueError, match=r"no implementation of 'gla' for platform 'pallas' here .*Use platform="):
        gla_attention(q, k, v, platform="pallas")


@pytest.mark.parametrize(("layer_idx", "num_layers"), [(3, 3), (-1, 3)])
def test_a_layer_outside_the_model(layer_idx, num_layers):
    with pytest.raises(ValueError, match="layer_idx must be from 0 to num_layers - 1"):
        lightning_attention(q, k, v, layer_idx=layer_idx, num_layers=num_layers)


@pytest.mark.parametrize("layer", [1.0, True, "1"])
def test_a_layer_that_is_no_int(layer):
    with pytest.raises(TypeError, match="layer_idx must be an int; got"):
        lightning_attention(q, k, v, layer_idx=layer, num_layers=4)


def test_numpy_integers_are_integers():
    config = LinearConfig(block_q=np.int64(16), block_k=np.int8(32), num_warps=np.int32(4))
    assert config == LinearConfig(block_q=16, block_k=32, num_warps=4)
    assert {type(getattr(config, name)) for name in ("block_q", "block_k", "num_warps")} == {int}
    want = lightning_attention(q, k, v, layer_idx=1, num_layers=4)
    np.testing.assert_array_equal(lightning_attention(q, k, v, layer_idx=np.int64(1), num_layers=jnp.int32(4)), want)
    np.testing.assert_array_equal(
        recurrent_attention(q, k, v, softmax_scale=np.int32(2)), recurrent_attention(q, k, v, softmax_scale=2.0)
    )
    traced = jax.jit(lambda scale: recurrent_attention(q, k, v, softmax_scale=scale))(2)
    np.testing.assert_allclose(traced, recurrent_attention(q, k, v, softmax_scale=2.0), rtol=1e-6)


def test_offsets_that_are_constants_of_a_jitted_function_are_checked():
    with pytest.raises(ValueError, match="cu_seqlens must not decrease; got 4 before 3 at index 2"):
        jax.jit(lambda: recurrent_attention(**row, cu_seqlens=np.array([0, 4, 3, T])))()


def test_typos_are_not_swallowed():
    with pytest.raises(TypeError, match="sofmax_scale"):
        recurrent_attention(q, k, v, sofmax_scale=1.0)  # type: ignore[call-arg]


def test_traced_cu_seqlens_are_taken_at_their_word():
    run = jax.jit(lambda cu: recurrent_attention(**row, cu_seqlens=cu))
    assert run(jnp.array([0, T])).shape == (1, T, H, V)
