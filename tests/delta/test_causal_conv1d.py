"""The short causal convolution: against the sum that defines it, packed, from a state, under every transformation."""

from __future__ import annotations

import functools
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ejkernel.modules.operations.causal_conv1d import causal_conv1d
from ejkernel.testing.compare import relative_rms


def arguments(lengths, width=4, channels=3, dtype=jnp.float32, seed=0, state=True):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    arrays = {"x": normal(1, sum(lengths), channels), "weight": normal(width, channels), "bias": normal(channels)}
    if state:
        arrays["initial_state"] = normal(len(lengths), width - 1, channels)
    return arrays, jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)


def by_definition(x, weight, bias, initial_state=None, *, offsets, activation=None):
    """(y `[1, T, C]`, state), one token at a time."""
    width, outputs, states = weight.shape[0], [], []
    for n, (start, end) in enumerate(itertools.pairwise(np.asarray(offsets))):
        past = jnp.zeros((width - 1, x.shape[2]), x.dtype) if initial_state is None else initial_state[n]
        seen = jnp.concatenate([past, x[0, start:end]])
        outputs += [sum(weight[j] * seen[t + j] for j in range(width)) + bias for t in range(end - start)]
        states.append(seen[end - start :])
    y = jnp.stack(outputs)[None] if outputs else jnp.zeros_like(x)
    return jax.nn.silu(y) if activation else y, jnp.stack(states)


def value_and_gradients(function, arrays):
    def loss(arrays):
        found = function(**arrays)
        return sum(jnp.sum(jnp.sin(x.astype(jnp.float32))) for x in found), found

    gradients, found = jax.jit(jax.grad(loss, has_aux=True))(arrays)
    return [*found, *(gradients[name] for name in arrays)]


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("lengths", [(9,), (2,), (5, 0, 1, 2, 7, 0)], ids=str)
def test_values_and_gradients_are_those_of_the_definition(lengths, state, activation):
    arrays, offsets = arguments(lengths, state=state)
    packing = {"cu_seqlens": offsets} if len(lengths) > 1 else {}
    ours = functools.partial(causal_conv1d, **packing, activation=activation, return_state=True)
    want = value_and_gradients(functools.partial(by_definition, offsets=offsets, activation=activation), arrays)
    for got, expected in zip(value_and_gradients(ours, arrays), want, strict=True):
        assert relative_rms(got, expected) < 1e-6


@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(st.lists(st.integers(0, 5), min_size=1, max_size=3), st.integers(1, 5), st.booleans())
def test_packed_rows_are_their_sequences_by_themselves(lengths, width, rank2):
    arrays, offsets = arguments(tuple(lengths), width=width)
    packed = arrays | ({"x": arrays["x"][0]} if rank2 else {})
    y, state = causal_conv1d(**packed, cu_seqlens=offsets, return_state=True)
    assert y.shape == packed["x"].shape
    for n, (start, end) in enumerate(itertools.pairwise(np.cumsum([0, *lengths]))):
        alone = arrays | {"x": arrays["x"][:, start:end], "initial_state": arrays["initial_state"][n : n + 1]}
        want, last = causal_conv1d(**alone, return_state=True)
        np.testing.assert_allclose(y.reshape(1, -1, 3)[:, start:end], want, rtol=1e-5, atol=1e-6)
        np.testing.assert_array_equal(state[n], last[0])


@pytest.mark.parametrize("cut", [0, 1, 5, 11])
def test_decoding_goes_on_where_it_stopped(cut):
    arrays, _ = arguments((11,))
    whole, final = causal_conv1d(**arrays, return_state=True)
    left, state = causal_conv1d(**(arrays | {"x": arrays["x"][:, :cut]}), return_state=True)
    right, end = causal_conv1d(**(arrays | {"x": arrays["x"][:, cut:], "initial_state": state}), return_state=True)
    np.testing.assert_allclose(jnp.concatenate([left, right], 1), whole, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(end, final)


@pytest.mark.parametrize(("batch", "offsets"), [(2, None), (1, [0, 0, 0])], ids=["dense", "packed"])
def test_no_tokens_hand_the_state_and_its_gradient_on(batch, offsets):
    x, weight, state = jnp.zeros((batch, 0, 3)), jnp.ones((2, 3)), jnp.arange(6.0).reshape(2, 1, 3)

    def last(x, weight, state):
        y, last = causal_conv1d(x, weight, None, state, offsets, return_state=True)
        return jnp.sum(y) + jnp.sum(last**2), last

    (dx, dweight, dstate), found = jax.grad(last, (0, 1, 2), has_aux=True)(x, weight, state)
    np.testing.assert_array_equal(found, state)
    np.testing.assert_array_equal(dstate, 2 * state)
    assert dx.shape == x.shape
    assert not dweight.any()


def test_a_sequence_does_not_see_its_neighbours_nor_their_nan():
    arrays, offsets = arguments((4, 5, 3))
    spoiled = arrays | {"x": arrays["x"].at[:, 6].set(jnp.nan)}
    loss = lambda arrays: jnp.sum(causal_conv1d(**arrays, cu_seqlens=offsets)[:, jnp.r_[0:4, 9:12]])
    run = functools.partial(causal_conv1d, cu_seqlens=offsets)
    np.testing.assert_array_equal(run(**spoiled)[:, 9:], run(**arrays)[:, 9:])
    np.testing.assert_array_equal(run(**spoiled)[:, :6], run(**arrays)[:, :6])
    np.testing.assert_array_equal(jax.grad(loss)(spoiled)["x"], jax.grad(loss)(arrays)["x"])


def test_what_lies_after_the_last_sequence_changes_nothing():
    arrays, offsets = arguments((4, 5))
    longer = arrays | {"x": jnp.pad(arrays["x"], [(0, 0), (0, 3), (0, 0)], constant_values=jnp.nan)}
    loss = lambda arrays, cu: jnp.sum(jnp.sin(causal_conv1d(**arrays, cu_seqlens=cu, activation="silu")))
    got, want = jax.jit(jax.grad(loss))(longer, offsets), jax.jit(jax.grad(loss))(arrays, offsets)
    assert not got["x"][:, 9:].any()
    for name in arrays:
        np.testing.assert_allclose(got[name][:, :9] if name == "x" else got[name], want[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_dtypes(dtype):
    arrays, _ = arguments((9,), dtype=jnp.dtype(dtype))
    y, state = causal_conv1d(**arrays, return_state=True)
    assert y.dtype == state.dtype == jnp.dtype(dtype)
    exact = causal_conv1d(**{name: x.astype(jnp.float32) for name, x in arrays.items()})
    assert relative_rms(y, exact.astype(dtype)) < 1e-6 + 0.1 * float(jnp.finfo(dtype).eps)  # sums in float32, rounded once


def rounding_errors(run, arrays):
    """Of each gradient of `run` in bfloat16, relative to the error of the exact one, rounded."""
    dy = jnp.cos(jnp.arange(arrays["x"].size)).reshape(arrays["x"].shape).astype(jnp.bfloat16)
    gradients = lambda arrays, dy: jax.vjp(lambda arrays: run(**arrays), arrays)[1](dy)[0]
    got = jax.jit(gradients)(arrays, dy)
    with jax.enable_x64(True):
        wide = lambda x: jnp.asarray(np.asarray(x, np.float64))
        exact = jax.jit(gradients)(jax.tree.map(wide, arrays), wide(dy))
        return {name: relative_rms(got[name], x) / relative_rms(x.astype(jnp.bfloat16), x) for name, x in exact.items()}


@pytest.mark.parametrize("lengths", [(70,), (40, 0, 1, 29)], ids=str)
def test_gradients_of_16_bit_arrays_are_rounded_once(lengths):
    arrays, offsets = arguments(lengths, channels=100, dtype=jnp.bfloat16)
    packing = {"cu_seqlens": offsets} if len(lengths) > 1 else {}
    errors = rounding_errors(functools.partial(causal_conv1d, **packing, activation="silu"), arrays)
    assert max(errors.values()) < 1.05, errors


def test_x64():
    with jax.enable_x64(True):
        arrays, offsets = arguments((4, 0, 5), dtype=jnp.float64)
        got = causal_conv1d(**arrays, cu_seqlens=offsets, return_state=True)
        want = by_definition(**arrays, offsets=offsets)
        assert all(x.dtype == jnp.float64 and relative_rms(x, y) < 1e-15 for x, y in zip(got, want, strict=True))


def test_transformations():
    arrays, offsets = arguments((4, 0, 5))
    loss = lambda arrays, cu: sum(jnp.sum(jnp.sin(x)) for x in causal_conv1d(**arrays, cu_seqlens=cu, return_state=True))
    want = jax.jit(jax.grad(loss))(arrays, offsets)
    close = lambda got, want: jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), got, want)
    close(jax.jit(jax.grad(jax.checkpoint(loss)))(arrays, offsets), want)
    twice = jax.jit(jax.vmap(jax.grad(loss), (None, 0)))(arrays, jnp.stack([offsets, offsets]))
    close(twice, jax.tree.map(lambda x: jnp.stack([x, x]), want))
    tangent = jax.jvp(lambda arrays: loss(arrays, offsets), (arrays,), (arrays,))[1]
    close(tangent, sum(jnp.vdot(want[name], arrays[name]) for name in arrays))


def test_shard_map_sums_the_gradient_of_shared_weights():
    mesh, one = Mesh(np.array(jax.devices()[:1]), ("x",)), arguments((9,))[0]
    specs: dict[str, Any] = {"mesh": mesh, "in_specs": (PartitionSpec("x"), PartitionSpec()), "out_specs": PartitionSpec("x")}
    loss = lambda weight, run: jnp.sum(jnp.sin(run(one["x"], weight)))
    got = jax.grad(loss)(one["weight"], jax.shard_map(causal_conv1d, **specs))
    np.testing.assert_allclose(got, jax.grad(loss)(one["weight"], causal_conv1d), rtol=1e-6)


def test_a_mesh_with_explicit_axes():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Explicit,))
    arrays, offsets = arguments((4, 0, 5))
    want = causal_conv1d(**arrays, cu_seqlens=offsets, return_state=True)
    with jax.set_mesh(mesh):
        place = lambda x: NamedSharding(mesh, PartitionSpec(*[None] * (x.ndim - 1), "x"))
        split = {name: jax.device_put(x, place(x)) for name, x in arrays.items()}
        got = causal_conv1d(**split, cu_seqlens=offsets, return_state=True)
        assert got[0].sharding.spec == PartitionSpec(None, None, "x")
        over_time = split | {"x": jax.device_put(arrays["x"], NamedSharding(mesh, PartitionSpec(None, "x")))}
        with pytest.raises(ValueError, match="x is split over time"):
            causal_conv1d(**over_time, cu_seqlens=offsets)
    for x, y in zip(got, want, strict=True):
        np.testing.assert_array_equal(x, y)


def test_symbolic_sizes_can_be_exported():
    batch, time = jax.export.symbolic_shape("b, t")
    shape = jax.ShapeDtypeStruct((batch, time, 3), jnp.float32)
    arrays, _ = arguments((9,))
    run = lambda x: causal_conv1d(x, arrays["weight"], activation="silu", return_state=True)
    exported = jax.export.export(jax.jit(run))(shape)
    for got, want in zip(exported.call(arrays["x"]), run(arrays["x"]), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6)


def test_an_open_width_is_refused():
    (width,) = jax.export.symbolic_shape("w")
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    with pytest.raises(ValueError, match=r"weight must have a known width, .*; got \[w, 3\]"):
        jax.export.export(jax.jit(causal_conv1d))(of(1, 6, 3), of(width, 3))


class Held:
    """An array as a variable of a module library holds it."""

    def __init__(self, array):
        self.array = array

    def __jax_array__(self):
        return self.array


def test_arrays_that_variables_hold():
    arrays, offsets = arguments((4, 0, 5))
    run = lambda arrays, offsets: causal_conv1d(**arrays, cu_seqlens=offsets)
    held = {name: Held(x) for name, x in arrays.items()}
    np.testing.assert_array_equal(run(held, Held(jnp.asarray(offsets))), run(arrays, offsets))
    jax.jit(lambda offsets: run(held, Held(offsets)))(jnp.asarray(offsets))


one = lambda *shape, dtype=jnp.float32: jnp.ones(shape, dtype)
right = {"x": one(2, 6, 3), "weight": one(4, 3)}
WRONG = [
    ({"x": one(6, 3)}, ValueError, "x must be [batch, time, channels] (rank 2 needs cu_seqlens); got [6, 3]."),
    ({"x": one(2, 6, 3, dtype=jnp.int32)}, TypeError, "x must be float32, bfloat16, float16 or float64; got int32."),
    ({"x": None}, TypeError, "x must be an array; got None."),
    ({"x": jax.ShapeDtypeStruct((2, 6, 3), jnp.float32)}, TypeError, "which has no values. jax.eval_shape calls a function"),
    ({"weight": one(3, 4)}, ValueError, "weight must be [width, 3] (taps from the oldest to the current token, channels)"),
    ({"weight": one(0, 3)}, ValueError, "got [0, 3]."),
    ({"bias": one(4)}, ValueError, "bias must be [3] (channels) to match x; got [4]."),
    ({"initial_state": one(2, 4, 3)}, ValueError, "initial_state must be [2, 3, 3] (sequences, width - 1, channels)"),
    ({"cu_seqlens": jnp.array([0, 6])}, ValueError, "x must have a batch of 1 when cu_seqlens packs the sequences"),
    ({"x": one(1, 6, 3), "cu_seqlens": jnp.array([0, 7])}, ValueError, "cu_seqlens must end at the number of tokens, 6"),
    ({"activation": "relu"}, ValueError, "activation must be None or 'silu'; got 'relu'."),
    ({"return_state": 1}, TypeError, "return_state must be True or False, known when the function is traced; got 1."),
]  # fmt: skip


@pytest.mark.parametrize(("change", "kind", "message"), WRONG)
def test_wrong_arguments(change, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        causal_conv1d(**(right | change))


def test_16_bit_inputs_under_strict_promotion():
    x, weight = jnp.ones((1, 3, 2), jnp.bfloat16), jnp.ones((2, 2))
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        y, state = causal_conv1d(x, weight, weight[0], jnp.ones((1, 1, 2)), activation="silu", return_state=True)
    assert y.dtype == state.dtype == jnp.bfloat16


@pytest.mark.parametrize("packed", [False, True])
def test_the_gradient_keeps_the_inputs_alone(packed):
    x, weight, offsets = jnp.ones((1, 64, 32), jnp.bfloat16), jnp.ones((4, 32), jnp.bfloat16), jnp.array([0, 10, 64])
    run = functools.partial(causal_conv1d, cu_seqlens=offsets if packed else None, activation="silu")
    kept = jax.tree.leaves(jax.vjp(run, x, weight)[1])
    assert sum(array.nbytes for array in kept) <= x.nbytes + weight.nbytes + offsets.nbytes
