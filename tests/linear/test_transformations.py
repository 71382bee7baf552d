"""The linear operations under JAX's transformations, and in 64 bits."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from ejkernel.kernels._linear import LinearConfig
from ejkernel.modules import RecurrentAttentionConfig, recurrent_attention
from ejkernel.testing.compare import assert_close, relative_rms
from ejkernel.testing.linear_cases import LinearCase

CHUNKED = RecurrentAttentionConfig("chunked", 8)
CASE = LinearCase("case", time=21, gates=("gk",), initial_state=True)
PACKED = LinearCase("packed", gates=("g", "g_gamma"), lengths=(6, 0, 15), initial_state=True)
operation = functools.partial(recurrent_attention, return_state=True, cfg=CHUNKED)


@pytest.mark.parametrize("case", [CASE, PACKED], ids=str)
def test_eager_equals_jit(case):
    assert_close(case.evaluate(operation, jit=False), case.expected(), case.tolerance)


def test_traced_cu_seqlens_serve_other_lengths_without_recompiling():
    run = jax.jit(lambda arrays, cu: recurrent_attention(**arrays, cu_seqlens=cu, return_state=True, cfg=CHUNKED))
    for lengths in ((6, 0, 15), (21, 0, 0), (0, 1, 20), (7, 7, 7)):
        case = LinearCase("lengths", gates=("g", "g_gamma"), lengths=lengths, initial_state=True)
        arrays, options = case.arguments()
        output, state = run(arrays, options["cu_seqlens"])
        want = case.expected()
        assert relative_rms(output, want["output"]) < 2e-6
        assert relative_rms(state, want["state"]) < 2e-6
    assert run._cache_size() == 1  # type: ignore[attr-defined]


def test_gradient_through_traced_cu_seqlens():
    arrays, options = PACKED.arguments()
    weights = PACKED.weights()

    def loss(arrays, cu):
        output, state = recurrent_attention(**arrays, cu_seqlens=cu, return_state=True, cfg=CHUNKED)
        return jnp.sum(output * weights[0]) + jnp.sum(state * weights[1])

    got = jax.jit(jax.grad(loss))(arrays, options["cu_seqlens"])
    want = PACKED.expected()
    assert all(relative_rms(got[name], want[f"d{name}"]) < 1e-5 for name in got)


@pytest.mark.parametrize("case", [CASE, PACKED], ids=str)
def test_vmap_of_values_and_gradients(case):
    arrays, options = case.arguments()
    twice = {name: jnp.stack([x, x * 0.5]) for name, x in arrays.items()}
    scalar = lambda arrays: sum(jnp.sum(jnp.sin(x)) for x in operation(**arrays, **options))
    got = jax.vmap(jax.value_and_grad(scalar))(twice)
    for i in range(2):
        one = jax.value_and_grad(scalar)({name: x[i] for name, x in twice.items()})
        jax.tree.map(lambda x, y, i=i: np.testing.assert_allclose(x[i], y, rtol=2e-4, atol=2e-5), got, one)


def test_vmap_over_one_argument_sums_the_others_gradients():
    arrays, options = CASE.arguments()
    queries = jnp.stack([arrays["query"], -0.3 * arrays["query"]])
    loss = lambda key, q: jnp.sum(jnp.cos(operation(**(arrays | {"query": q, "key": key}), **options)[0]))
    mapped = jax.grad(lambda key: jnp.sum(jax.vmap(loss, (None, 0))(key, queries)))(arrays["key"])
    single = sum(jax.grad(loss)(arrays["key"], q) for q in queries)
    assert relative_rms(mapped, single) < 1e-5


def test_vmap_over_cu_seqlens():
    arrays, _ = PACKED.arguments()
    offsets = jnp.array([[0, 6, 6, 21], [0, 1, 20, 21]], jnp.int32)
    got = jax.vmap(lambda cu: recurrent_attention(**arrays, cu_seqlens=cu, cfg=CHUNKED))(offsets)
    for i in range(2):
        assert relative_rms(got[i], recurrent_attention(**arrays, cu_seqlens=offsets[i], cfg=CHUNKED)) < 1e-6


def test_checkpoint_recomputes_the_same_gradient():
    got = CASE.evaluate(lambda *, reverse, softmax_scale, **arrays: jax.checkpoint(operation)(**arrays))
    assert_close(got, CASE.expected(), CASE.tolerance)


def test_inside_scan_as_layers():
    arrays, options = CASE.arguments()
    layers = jnp.array([0.5, 1.5])

    def model(scales, unroll):
        def layer(x, scale):
            return recurrent_attention(**(arrays | {"query": x * scale}), **options, cfg=CHUNKED), None

        return jnp.sum(jnp.sin(jax.lax.scan(layer, arrays["query"], scales, unroll=unroll)[0]))

    looped, unrolled = (jax.jit(jax.grad(model), static_argnums=1)(layers, n) for n in (1, 2))
    assert relative_rms(looped, unrolled) < 1e-4


@pytest.mark.parametrize("schedule", ["chunked", "recurrent"])
@pytest.mark.parametrize("case", [CASE, PACKED], ids=str)
def test_forward_mode_equals_reverse_mode(case, schedule):
    arrays, options = case.arguments()
    cfg = LinearConfig(schedule, 8)
    function = lambda arrays: recurrent_attention(**arrays, **options, return_state=True, cfg=cfg)
    tangents = jax.tree.map(jnp.cos, arrays)
    (output, state), moved = jax.jvp(function, (arrays,), (tangents,))
    cotangents = (jnp.sin(output), jnp.sin(state))
    gradients = jax.vjp(function, arrays)[1](cotangents)[0]
    forward = sum(jnp.vdot(x, y) for x, y in zip(cotangents, moved, strict=True))
    reverse = sum(jnp.vdot(gradients[name], tangents[name]) for name in arrays)
    np.testing.assert_allclose(forward, reverse, rtol=1e-4)


@pytest.mark.parametrize("schedule", ["chunked", "recurrent"])
def test_shard_map_over_batch_and_heads(schedule):
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
    arrays, options = CASE.arguments()
    spec = {name: PartitionSpec("data", None, "model") for name in ("query", "key", "value", "gk")}
    spec["initial_state"] = PartitionSpec("data", "model")
    outputs = (PartitionSpec("data", None, "model"), PartitionSpec("data", "model"))

    def sharded(**arrays):
        call = lambda arrays: recurrent_attention(**arrays, **options, return_state=True, cfg=LinearConfig(schedule, 8))
        return jax.shard_map(call, mesh=mesh, in_specs=(spec,), out_specs=outputs)(arrays)

    got = CASE.evaluate(lambda **kwargs: sharded(**{name: kwargs[name] for name in arrays}))
    assert_close(got, CASE.expected(), CASE.tolerance)


def test_sixty_four_bits_are_exact_to_the_twelfth_digit():
    with jax.enable_x64(True):
        for schedule in ("chunked", "recurrent"):
            case = LinearCase("wide", time=40, gates=("g", "g_gamma", "gk", "gv"), initial_state=True, dtype="float64")
            got = case.evaluate(functools.partial(operation, cfg=LinearConfig(schedule, 16)))
            assert_close(got, case.expected(), case.tolerance)


def test_x64_leaves_float32_calls_alone():
    with jax.enable_x64(True):
        output, state = operation(**CASE.arguments()[0])
    assert output.dtype == state.dtype == jnp.float32


def test_a_traced_scale_equals_a_number_and_has_a_gradient():
    arrays, _ = LinearCase("scaled", gates=("g",), dtype="bfloat16").arguments()
    run = lambda scale: recurrent_attention(**arrays, softmax_scale=scale, cfg=CHUNKED)
    traced = jax.jit(run)(jnp.float32(0.3))
    assert traced.dtype == jnp.bfloat16
    assert relative_rms(traced, run(0.3)) < 4e-3
    slope = jax.grad(lambda s: jnp.sum(run(s).astype(jnp.float32)))(jnp.float32(0.3))
    np.testing.assert_allclose(slope, jnp.sum(run(1.0).astype(jnp.float32)), rtol=1e-2)


def test_nothing_leaks_from_a_trace():
    with jax.check_tracer_leaks():
        arrays, options = CASE.arguments()
        loss = lambda arrays: jnp.sum(operation(**arrays, **options)[0])
        jax.jit(jax.grad(loss))(arrays)
