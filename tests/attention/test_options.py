"""What each argument of `attention` means, and what it refuses."""

from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._attention import AttentionConfig
from ejkernel.modules import attention
from ejkernel.testing.attention_reference import attention_reference
from ejkernel.types.mask import MaskInfo

B, T, S, H, HKV, D = 2, 12, 10, 4, 2, 8
DIRECT, BLOCKWISE = AttentionConfig("direct"), AttentionConfig(block_q=4, block_k=4)
ROWS = MaskInfo.from_segments(np.zeros((B, T), int), np.zeros((B, S), int))
both_schedules = pytest.mark.parametrize("cfg", [DIRECT, BLOCKWISE], ids=["direct", "blockwise"])


def arrays(q_len: int = T, kv_len: int = S, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = (B, q_len, H, D), (B, kv_len, HKV, D), (B, kv_len, HKV, D)
    return tuple(jax.random.normal(k, shape, dtype) for k, shape in zip(keys, shapes, strict=True))


def expected(q, k, v, **options):
    return attention_reference(q, k, v, np.zeros(q.shape), **options).output


def test_every_array_works_by_position():
    q, k, v = arrays()
    bias, rng, sinks = jnp.ones((1, H, T, S)), jax.random.key(1), jnp.zeros((H, 1))
    options = {"deterministic": False, "dropout_prob": 0.5, "dtype": None}
    by_position = attention(q, k, v, bias, rng, sinks, **options)
    by_name = attention(query=q, key=k, value=v, bias=bias, dropout_rng=rng, softmax_aux=sinks, **options)
    jax.tree.map(np.testing.assert_array_equal, by_position, by_name)


def test_return_weights():
    q, k, v = arrays()
    output, weights = attention(q, k, v, dtype=None)
    assert (output.shape, weights.shape) == ((B, T, H, D), (B, H, T, S))
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-6)
    alone = attention(q, k, v, dtype=None, return_weights=False)
    np.testing.assert_array_equal(alone, output)


@both_schedules
def test_weights_are_what_multiplies_value(cfg):
    q, k, v = arrays()
    options = {"deterministic": False, "dropout_prob": 0.4, "dropout_rng": jax.random.key(3), "softmax_aux": jnp.zeros(1)}
    output, weights = attention(q, k, v, dtype=None, causal=True, cfg=cfg, **options)
    product = jnp.einsum("bhts,bshd->bthd", weights, jnp.repeat(v, H // HKV, 2), precision="highest")
    np.testing.assert_allclose(output, product, atol=2e-6)


def test_gradient_through_the_weights():
    q, k, v = arrays()
    cfg = BLOCKWISE
    loss = lambda q, cfg: (attention(q, k, v, dtype=None, cfg=cfg)[1] ** 2).sum()
    np.testing.assert_allclose(jax.grad(loss)(q, cfg), jax.grad(loss)(q, DIRECT), atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16, jnp.bfloat16])
def test_dtype_is_that_of_the_output_and_gradients_keep_their_own(dtype):
    q, k, v = arrays()
    output, weights = attention(q, k, v, dtype=dtype)
    assert (output.dtype, weights.dtype) == (dtype, dtype)
    grad = jax.grad(lambda q: attention(q, k, v, dtype=dtype, return_weights=False).astype(jnp.float32).sum())(q)
    assert grad.dtype == jnp.float32


def test_dtype_defaults_to_bfloat16_and_none_means_the_inputs():
    q, k, v = arrays()
    assert attention(q, k, v, return_weights=False).dtype == jnp.bfloat16
    assert attention(q, k, v, dtype=None, return_weights=False).dtype == jnp.float32
    assert attention(*arrays(dtype=jnp.float16), dtype=None, return_weights=False).dtype == jnp.float16
    assert attention(q.astype(jnp.bfloat16), k, v, dtype=None, return_weights=False).dtype == jnp.float32


def test_float64_is_computed_in_float64():
    with jax.enable_x64(True):
        q, k, v = (jnp.asarray(np.asarray(x), jnp.float64) for x in arrays())
        for cfg in (DIRECT, BLOCKWISE):
            fun = functools.partial(attention, key=k, value=v, dtype=None, causal=True, cfg=cfg)
            (output, weights), pull = jax.vjp(fun, q)
            assert (output.dtype, weights.dtype) == (jnp.float64, jnp.float64)
            want = attention_reference(q, k, v, np.ones(q.shape), causal=True)
            np.testing.assert_allclose(output, want.output, atol=1e-14)
            (dq,) = pull((jnp.ones_like(output), jnp.zeros_like(weights)))
            np.testing.assert_allclose(dq, want.gradients["query"], atol=1e-14)


@pytest.mark.parametrize("cfg", [DIRECT, BLOCKWISE])
def test_nothing_is_in_float64_unless_inputs_are(cfg):
    with jax.enable_x64(True):
        q, k, v = (x.astype(jnp.float32) for x in arrays(dtype=jnp.float32))
        fun = lambda q: attention(q, k, v, dtype=None, causal=True, softmax_aux=jnp.zeros(1, jnp.float32), cfg=cfg)
        program = str(jax.make_jaxpr(lambda q: jax.vjp(fun, q)[1](fun(q)))(q))
        assert not re.search(r"f64\[\d", program)  # numbers such as -inf are f64[] and take the other side's dtype


@both_schedules
def test_softmax_dtype_is_the_dtype_of_exponentials(cfg):
    q, k, v = arrays()
    narrow = attention(q, k, v, dtype=None, softmax_dtype=jnp.bfloat16, cfg=cfg, return_weights=False)
    wide = attention(q, k, v, dtype=None, cfg=cfg, return_weights=False)
    assert narrow.dtype == jnp.float32
    assert 1e-4 < np.abs(narrow - wide).max() < 3e-2
    run = lambda q: attention(q, k, v, dtype=None, softmax_dtype=jnp.bfloat16, cfg=cfg, return_weights=False)
    text = jax.jit(run).lower(q).as_text()
    assert any("bf16" in line and "stablehlo.exponential" in line for line in text.splitlines())


def test_init_bias_is_called_only_without_bias_and_mask():
    q, k, v = arrays()
    calls = []

    def init_bias():
        calls.append(1)
        return jnp.full((1, 1, T, S), -jnp.inf).at[..., 0].set(0)

    output = attention(q, k, v, init_bias=init_bias, dtype=None, return_weights=False)
    np.testing.assert_allclose(output, jnp.repeat(v[:, :1], H // HKV, 2).repeat(T, 1), atol=1e-6)
    assert calls == [1]
    attention(q, k, v, jnp.zeros((1, 1, T, S)), init_bias=init_bias)
    attention(q, k, v, attention_mask=jnp.ones((B, S), bool), init_bias=init_bias)
    attention(q, k, v, mask_info=MaskInfo.from_attention_mask(jnp.ones((B, T, S), bool)), init_bias=init_bias)
    assert calls == [1]


def test_init_bias_applies_with_causal():
    q, k, v = arrays()
    bias = np.random.default_rng(0).normal(size=(1, H, T, S)).astype(np.float32)
    output = attention(q, k, v, init_bias=lambda: bias, causal=True, dtype=None, return_weights=False)
    np.testing.assert_allclose(output, expected(q, k, v, bias=bias, causal=True), atol=1e-6)


@both_schedules
def test_a_row_without_keys_gives_zeros_and_zero_gradients(cfg):
    q, k, v = arrays()
    mask = jnp.ones((B, T, S), bool).at[:, 3].set(False)
    bias = jnp.zeros((B, 1, T, S)).at[:, :, 5].set(-jnp.inf)
    fun = lambda q, k, v, bias: attention(q, k, v, bias, attention_mask=mask, dtype=None, cfg=cfg, return_weights=False)
    output, pull = jax.vjp(fun, q, k, v, bias)
    dq, dk, dv, dbias = pull(jnp.ones_like(output))
    for row in (3, 5):
        assert not np.any(output[:, row])
        assert not np.any(dq[:, row])
        assert not np.any(dbias[:, :, row])
    assert all(np.all(np.isfinite(x)) for x in (output, dq, dk, dv, dbias))
    only = jax.vjp(fun, q, k, v, bias)[1](jnp.zeros_like(output).at[:, 3].set(1).at[:, 5].set(1))
    assert not any(np.any(x) for x in only)


@both_schedules
@pytest.mark.parametrize("low", [-1e9, float(jnp.finfo(jnp.float32).min)])
def test_a_finite_bias_for_every_key_makes_weights_alike_in_the_gradient_too(cfg, low):
    q, k, v = arrays()
    bias, sinks = jnp.zeros((T, 1)).at[3].set(low), jnp.full((H, 1), low)
    fun = lambda v, sinks: attention(q, k, v, bias, softmax_aux=sinks, dtype=None, return_weights=False, cfg=cfg)[:, 3].sum()
    dv, dsinks = jax.grad(fun, (0, 1))(v, sinks)
    np.testing.assert_allclose(dv, np.full(v.shape, H / HKV / (S + 1)), rtol=1e-5)
    np.testing.assert_allclose(dsinks[:, 0], -v.sum((0, 1, 3)).repeat(H // HKV) / (S + 1) ** 2, rtol=1e-3)


@both_schedules
def test_masks_and_bias_and_mask_info_all_apply(cfg):
    q, k, v = arrays()
    rng = np.random.default_rng(1)
    mask, info = rng.random((B, HKV, T, S)) < 0.7, rng.random((B, H, T, S)) < 0.7
    bias = rng.normal(size=(B, HKV, T, S)).astype(np.float32)
    output = attention(
        q,
        k,
        v,
        bias,
        attention_mask=mask,
        mask_info=MaskInfo.from_attention_mask(info),
        causal=True,
        dtype=None,
        cfg=cfg,
        return_weights=False,
    )
    joined = np.repeat(mask, H // HKV, 1) & info
    np.testing.assert_allclose(output, expected(q, k, v, bias=bias, attention_mask=joined, causal=True), atol=1e-6)


@both_schedules
def test_mask_info_bias_is_the_mask(cfg):
    q, k, v = arrays(T, T)
    info = MaskInfo.from_segments(jnp.array([[0] * 5 + [1] * 4 + [-1] * 3] * B))
    by_bias = attention(q, k, v, info.bias, dtype=None, cfg=cfg, return_weights=False)
    by_info = attention(q, k, v, mask_info=info, dtype=None, cfg=cfg, return_weights=False)
    np.testing.assert_allclose(by_bias, by_info, atol=1e-6)
    assert not np.any(by_bias[:, 9:])


@both_schedules
def test_a_query_block_at_the_end_of_a_cache(cfg):
    q, k, v = arrays(T, T)
    whole = attention(q, k, v, causal=True, sliding_window=(4, 0), dtype=None, cfg=cfg, return_weights=False)
    info = MaskInfo.from_segments(
        jnp.zeros((B, 3), jnp.int32), jnp.zeros((B, T), jnp.int32), q_positions=jnp.array([[9, 10, 11]] * B)
    )
    last = attention(
        q[:, 9:], k, v, mask_info=info, causal=True, sliding_window=(4, 0), dtype=None, cfg=cfg, return_weights=False
    )
    np.testing.assert_allclose(last, whole[:, 9:], atol=1e-6)


@both_schedules
def test_packed_sequences_do_not_see_each_other(cfg):
    q, k, v = (x[:1] for x in arrays(T, T))
    packed = attention(
        q,
        k,
        v,
        mask_info=MaskInfo.from_cu_seqlens(jnp.array([0, 5, 12])),
        causal=True,
        dtype=None,
        cfg=cfg,
        return_weights=False,
    )
    for part in (slice(0, 5), slice(5, 12)):
        alone = attention(q[:, part], k[:, part], v[:, part], causal=True, dtype=None, cfg=cfg, return_weights=False)
        np.testing.assert_allclose(packed[:, part], alone, atol=1e-6)


def test_a_mask_info_of_one_row_serves_the_batch():
    q, k, v = arrays(T, T)
    ids = jnp.array([[0] * 6 + [1] * 6])
    one = attention(
        q, k, v, mask_info=MaskInfo.from_segments(ids), causal=True, dtype=None, cfg=BLOCKWISE, return_weights=False
    )
    both = attention(
        q, k, v, mask_info=MaskInfo.from_segments(ids.repeat(B, 0)), causal=True, dtype=None, cfg=DIRECT, return_weights=False
    )
    np.testing.assert_allclose(one, both, atol=1e-6)


def test_no_sinks_is_as_none_and_sinks_of_minus_infinity_too():
    q, k, v = arrays()
    plain = attention(q, k, v, dtype=None, return_weights=False)
    np.testing.assert_array_equal(attention(q, k, v, softmax_aux=jnp.zeros((H, 0)), dtype=None, return_weights=False), plain)
    fun = lambda sinks, cfg: attention(q, k, v, softmax_aux=sinks, dtype=None, cfg=cfg, return_weights=False).sum()
    for cfg in (DIRECT, BLOCKWISE):
        value, grad = jax.value_and_grad(fun)(jnp.full((H, 2), -jnp.inf), cfg)
        np.testing.assert_allclose(value, plain.sum(), rtol=1e-4)
        assert not np.any(grad)


@both_schedules
def test_traced_scale_and_its_gradient(cfg):
    q, k, v = arrays()
    d_output = np.random.default_rng(0).normal(size=(B, T, H, D)).astype(np.float32)
    fun = lambda scale: (
        attention(q, k, v, softmax_scale=scale, dtype=None, causal=True, cfg=cfg, return_weights=False) * d_output
    ).sum()
    got = jax.jit(jax.grad(fun))(0.7)
    want = attention_reference(q, k, v, d_output, softmax_scale=0.7, causal=True).gradients["softmax_scale"]
    np.testing.assert_allclose(got, want, rtol=2e-5)
    np.testing.assert_allclose(jax.jit(fun)(0.7), fun(0.7), rtol=1e-5)


class TestDropout:
    def call(self, cfg=DIRECT, **options):
        q, k, v = arrays()
        options = {"deterministic": False, "dropout_prob": 0.5, "dropout_rng": jax.random.key(0), "dtype": None} | options
        return attention(q, k, v, cfg=cfg, **options)

    def test_a_key_gives_the_same_mask_in_every_schedule_and_block_size(self):
        direct = self.call()
        for blocks in ((4, 4), (5, 3), (12, 10)):
            got = self.call(AttentionConfig(block_q=blocks[0], block_k=blocks[1]))
            np.testing.assert_allclose(got[0], direct[0], atol=1e-6)
            np.testing.assert_array_equal(got[1], direct[1])
        assert np.any(self.call(dropout_rng=jax.random.key(1))[1] != direct[1])

    def test_old_style_keys_work(self):
        assert np.any(self.call(dropout_rng=jax.random.PRNGKey(0))[1] == 0)

    def test_elements_are_dropped_one_by_one_with_the_given_probability(self):
        q = jnp.zeros((2, 64, 4, 8))
        weights = attention(q, q, q, deterministic=False, dropout_prob=0.25, dropout_rng=jax.random.key(5), dtype=None)[1]
        kept = np.asarray(weights) != 0
        assert abs(kept.mean() - 0.75) < 0.01
        np.testing.assert_allclose(weights[kept], 1 / 64 / 0.75, rtol=1e-6)
        for axis in range(4):  # nothing is shared along any axis
            assert abs(np.mean(kept & np.roll(kept, 1, axis)) - 0.75**2) < 0.02

    @pytest.mark.parametrize(
        "options", [{"deterministic": True}, {"dropout_prob": 0.0}, {"deterministic": True, "dropout_rng": None}]
    )
    def test_off(self, options):
        np.testing.assert_array_equal(self.call(**options)[0], attention(*arrays(), dtype=None, return_weights=False))

    def test_without_a_key(self):
        with pytest.raises(ValueError, match="dropout_rng must be given"):
            self.call(dropout_rng=None)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"query": jnp.ones((T, H, D))}, ValueError, "query must be rank 4"),
        ({"query": jnp.ones((B, T, H, D), int)}, TypeError, "query must be floating point"),
        ({"key": jnp.ones((B, S, HKV, D + 1))}, ValueError, "key must be"),
        ({"value": jnp.ones((B, S + 1, HKV, D))}, ValueError, rf"value must be \[{B}, {S}, {HKV}, V\] \(batch"),
        ({"query": jnp.ones((B, T, 3, D))}, ValueError, "query heads must be a multiple of key heads; got 3 and 2"),
        ({"bias": jnp.ones((B, 3, T, S))}, ValueError, rf"bias must be \[1\|{B}, 1\|{HKV}\|{H}, 1\|{T}, 1\|{S}\] \(batch"),
        ({"bias": jnp.ones((B, 1, T, S), bool)}, TypeError, "bias must be floating point"),
        ({"attention_mask": jnp.ones((B, S))}, TypeError, "attention_mask must be bool"),
        ({"attention_mask": jnp.ones((S,), bool)}, ValueError, "attention_mask must be"),
        ({"attention_mask": jnp.ones((B, T, S + 1), bool)}, ValueError, "attention_mask must be"),
        ({"mask_info": jnp.ones((B, S), bool)}, TypeError, "mask_info must be a MaskInfo"),
        ({"mask_info": MaskInfo.from_segments(jnp.zeros((B, T), int))}, ValueError, "mask_info must be for"),
        ({"mask_info": ROWS.replace(q_positions=np.zeros((B, S), int))}, ValueError, rf"q_positions must be .* \[{B}, {S}\]"),
        (
            {"mask_info": MaskInfo(q_segment_ids=np.zeros(T, int), kv_segment_ids=np.zeros(S, int))},
            ValueError,
            r"q_segment_ids must be \[B, length\]",
        ),
        (
            {"mask_info": MaskInfo(q_segment_ids=np.zeros((B, T)), kv_segment_ids=np.zeros((B, S)))},
            TypeError,
            "q_segment_ids must be integers",
        ),
        ({"mask_info": MaskInfo(np.ones((B, S), bool))}, ValueError, r"attention_mask must be bool \[B, 1\|H, Q, K\]"),
        ({"softmax_aux": jnp.ones((3, 2))}, ValueError, rf"softmax_aux must be \[sinks\] or \[{HKV}\|{H}, sinks\]"),
        ({"softmax_aux": jnp.ones((2,), int)}, TypeError, "softmax_aux must be floating point"),
        ({"softmax_scale": jnp.ones((2,))}, ValueError, "softmax_scale must be a number"),
        ({"softmax_scale": jnp.complex64(1)}, ValueError, r"softmax_scale must be a number or .* got complex64\[\]"),
        ({"softmax_scale": "a"}, TypeError, "softmax_scale must be a number; got 'a'"),
        ({"softmax_scale": [1, [2, 3]]}, TypeError, "softmax_scale must be a number"),
        ({"logits_soft_cap": 0.0}, ValueError, "logits_soft_cap must be positive"),
        ({"logits_soft_cap": float("inf")}, ValueError, r"logits_soft_cap must be .* \(None: no cap\); got inf"),
        ({"logits_soft_cap": "a"}, TypeError, "logits_soft_cap must be a number; got 'a'"),
        ({"dtype": "junk"}, TypeError, "dtype must be a dtype, .* got 'junk'"),
        ({"softmax_dtype": "junk"}, TypeError, "softmax_dtype must be a dtype, .* got 'junk'"),
        ({"query": [1, [2, 3]]}, TypeError, r"query must be an array; got \[1, \[2, 3\]\]"),
        ({"bias": "a"}, TypeError, "bias must be an array; got 'a'"),
        ({"attention_mask": "a"}, TypeError, "attention_mask must be an array; got 'a'"),
        ({"softmax_aux": "a"}, TypeError, "softmax_aux must be an array; got 'a'"),
        ({"init_bias": 3}, TypeError, "init_bias must be a function"),
        ({"causal": "no"}, TypeError, "causal must be True or False"),
        ({"deterministic": "no"}, TypeError, "deterministic must be True or False"),
        ({"return_weights": "no"}, TypeError, "return_weights must be True or False"),
        ({"dropout_prob": "a"}, TypeError, "dropout_prob must be a number; got 'a'"),
        ({"dropout_prob": 0.5, "deterministic": False, "dropout_rng": 3}, TypeError, "dropout_rng must be one key, .* got 3"),
        ({"dtype": jnp.int32}, TypeError, "dtype must be None or one of"),
        ({"softmax_dtype": jnp.int32}, TypeError, "softmax_dtype must be"),
        ({"dropout_prob": 1.0, "deterministic": False}, ValueError, "dropout_prob must be"),
        ({"sliding_window": -1}, ValueError, "sliding_window must not be negative"),
        ({"sliding_window": (1, 2, 3)}, TypeError, "sliding_window must be an int or a pair"),
        ({"sliding_window": 1.5}, TypeError, "sliding_window must be an int or a pair"),
        ({"platform": "abacus"}, ValueError, "platform must be one of"),
        ({"cfg": {"block_q": 4}}, TypeError, "cfg must be a frozen dataclass"),
    ],
)
def test_errors_name_the_argument(options, error, message):
    q, k, v = arrays()
    with pytest.raises(error, match=message):
        attention(**({"query": q, "key": k, "value": v} | options))


def test_errors_say_each_legal_size_once():
    x = jnp.ones((1, 1, 2, 4))
    with pytest.raises(ValueError, match=r"softmax_aux must be \[sinks\] or \[2, sinks\]"):
        attention(x, x, x, softmax_aux=jnp.ones((3, 2)))
    with pytest.raises(ValueError, match=r"bias must be \[1, 1\|2, 1, 1\]"):
        attention(x, x, x, bias=jnp.ones((1, 3, 1, 1)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"schedule": "sideways"}, "schedule must be one of"),
        ({"schedule": "direct", "block_q": 4}, "block_q must be None with schedule 'direct'"),
        ({"block_k": 0}, "block_k must be an int of at least 1"),
        ({"platform": "abacus"}, "platform must be one of"),
        ({"backend": "abacus"}, "backend must be one of"),
    ],
)
def test_config_refuses(fields, message):
    with pytest.raises(ValueError, match=message):
        AttentionConfig(**fields)


@both_schedules
@pytest.mark.parametrize("dtype", [np.uint8, np.uint32, np.int8])
def test_a_mask_info_that_was_built_by_hand_is_as_one_that_was_not(cfg, dtype):
    q, k, v = arrays(T, T)
    ids = np.array([[0] * 5 + [1] * 7] * B, dtype)
    call = lambda info: attention(q, k, v, mask_info=info, dtype=None, cfg=cfg, return_weights=False)
    wanted = call(MaskInfo.from_segments(ids))
    np.testing.assert_array_equal(call(MaskInfo(q_segment_ids=ids, kv_segment_ids=ids)), wanted)
    np.testing.assert_array_equal(call(MaskInfo(q_segment_ids=ids.tolist(), kv_segment_ids=ids.tolist())), wanted)


def test_numpy_integers_are_integers():
    q, k, v = arrays()
    config = AttentionConfig(block_q=np.int64(4), block_k=np.int8(4))
    assert (config, type(config.block_q)) == (BLOCKWISE, int)
    call = lambda window: attention(q, k, v, sliding_window=window, dtype=None, cfg=DIRECT, return_weights=False)
    np.testing.assert_array_equal(call((np.int8(2), np.uint64(3))), call((2, 3)))


@pytest.mark.parametrize("window", [2**31 - 1, 2**40])
def test_a_window_beyond_every_position_keeps_everything(window):
    q, k, v = arrays(T, T)
    info = MaskInfo.from_segments(jnp.zeros((B, T), int), q_positions=jnp.arange(T)[None].repeat(B, 0) + 3)
    call = jax.jit(
        lambda info, window: attention(
            q, k, v, mask_info=info, sliding_window=window, dtype=None, cfg=BLOCKWISE, return_weights=False
        ),
        static_argnums=1,
    )
    np.testing.assert_array_equal(call(info, window), call(info, 100))
