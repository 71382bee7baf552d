"""The short causal convolution's Triton kernels, interpreted: against XLA's form and float64, under every transformation.

`compile_for` is what makes a call take them where there is no GPU.
"""

from __future__ import annotations

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ejkernel._device import Device, device_of
from ejkernel.callib import compile_for
from ejkernel.kernels._triton.causal_conv1d import covers
from ejkernel.modules import causal_conv1d
from ejkernel.testing.compare import relative_rms
from tests.delta.test_causal_conv1d import by_definition, rounding_errors
from tests.triton.processes import outside

pytest.importorskip("triton", reason="the triton platform needs Triton")
pytestmark = pytest.mark.skipif(device_of(()).backend != "cpu", reason="interpreted on the host")
PACKED = (5, 0, 1, 34, 2, 0)


def drawn(shape=(2, 37, 130), width=4, bias=True, state=False, lengths=None, dtype=jnp.float32):
    rng = np.random.default_rng(0)
    normal = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)
    B, _, C = shape if lengths is None else (1, 0, shape[2])
    arrays = {"x": normal(*shape) if lengths is None else normal(1, sum(lengths), C), "weight": normal(width, C)}
    arrays |= {"bias": normal(C)} if bias else {}
    arrays |= {"initial_state": normal(B if lengths is None else len(lengths), width - 1, C)} if state else {}
    return arrays, None if lengths is None else jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)


def by_kernels(function):
    """`function`, whose calls take the kernels."""

    @functools.wraps(function)
    def run(*args, **kwargs):
        with compile_for(90):
            return function(*args, **kwargs)

    return run


def both(arrays, run):
    """Outputs and gradients."""
    outputs, pull = jax.vjp(lambda arrays: run(**arrays), arrays)
    weights = lambda y: (1 + jnp.cos(jnp.arange(y.size, dtype=jnp.float32))).reshape(y.shape).astype(y.dtype)
    return {"outputs": outputs, **pull(jax.tree.map(weights, outputs))[0]}


def kernels_and_xla(run, arrays, *rest) -> tuple[Any, Any]:
    """`run(arrays, *rest)`, compiled, by the kernels and by XLA."""
    compiled = lambda run: jax.jit(lambda *args: run(*args))(arrays, *rest)
    return compiled(by_kernels(run)), compiled(run)


def launches(function, *args):
    """How many kernels the program of a function launches."""
    return by_kernels(lambda: jax.jit(lambda *args: function(*args)).lower(*args).as_text())().count("cpu_callback(")


def close(got, want, limit=2e-6):
    errors = jax.tree.map(relative_rms, got, want)
    assert max(jax.tree.leaves(errors)) < limit, errors


@pytest.mark.parametrize("state", [True, False])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize(
    ("width", "bias", "lengths"), [(4, True, None), (3, True, PACKED), (1, False, None), (8, False, PACKED)]
)
def test_values_and_gradients_are_those_of_xla(width, bias, lengths, activation, state):
    arrays, offsets = drawn(width=width, bias=bias, state=state, lengths=lengths)
    if lengths is not None:  # the last two tokens are in no sequence
        arrays["x"] = jnp.pad(arrays["x"], [(0, 0), (0, 2), (0, 0)], constant_values=jnp.nan)
    options = {"activation": activation, "return_state": True}
    run = lambda arrays, offsets: both(arrays, functools.partial(causal_conv1d, cu_seqlens=offsets, **options))
    close(*kernels_and_xla(run, arrays, offsets))


def test_packed_rows_are_those_of_a_loop_in_float64():
    arrays, offsets = drawn(shape=(1, 0, 7), lengths=PACKED, state=True)
    run = functools.partial(causal_conv1d, cu_seqlens=offsets, activation="silu", return_state=True)
    got, _ = kernels_and_xla(lambda arrays: both(arrays, run), arrays)
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(x, jnp.float64) for name, x in arrays.items()}
        loop = functools.partial(by_definition, offsets=np.cumsum([0, *PACKED]), activation="silu")
        want = jax.jit(lambda arrays: both(arrays, loop))(wide)
    close(got, want)


@pytest.mark.parametrize("width", [2, 4])
def test_several_tiles_are_those_of_float64(width):
    """Of tokens, both ways, and of channels."""
    arrays, _ = drawn(shape=(2, 300, 131), width=width)
    run = functools.partial(causal_conv1d, activation="silu")
    got, _ = kernels_and_xla(lambda arrays: both(arrays, run), arrays)
    with jax.enable_x64(True):
        want = both({name: jnp.asarray(x, jnp.float64) for name, x in arrays.items()}, run)
    close(got, want)


@pytest.mark.parametrize(("dtype", "limit"), [("bfloat16", 6e-3), ("float16", 1e-3)])
def test_16_bit_arrays(dtype, limit):
    arrays, offsets = drawn(lengths=PACKED, state=True, dtype=dtype)
    run = functools.partial(causal_conv1d, cu_seqlens=offsets, activation="silu")
    got, _ = kernels_and_xla(lambda arrays: both(arrays, run), arrays)
    assert all(got[name].dtype == dtype for name in ("outputs", *arrays))
    close(got, both({name: x.astype(jnp.float32) for name, x in arrays.items()}, run), limit)


@pytest.mark.parametrize("lengths", [None, PACKED])
def test_gradients_of_16_bit_arrays_are_rounded_once(lengths):
    """Also of weights and bias, of which tokens that see the state have their own part. Their own x has two such parts."""
    arrays, offsets = drawn(lengths=lengths, state=True, dtype=jnp.bfloat16)
    exact = functools.partial(causal_conv1d, cu_seqlens=offsets, activation="silu")

    def run(**arrays):
        return (by_kernels(exact) if arrays["x"].dtype == jnp.bfloat16 else exact)(**arrays)

    errors = rounding_errors(run, arrays)
    assert errors.pop("x") < 1.1
    assert max(errors.values()) < 1.05, errors


def test_weights_of_another_dtype_than_the_inputs():
    arrays, _ = drawn(bias=True)
    mixed = arrays | {"x": arrays["x"].astype(jnp.bfloat16)}
    got, want = both(mixed, by_kernels(causal_conv1d)), both(mixed, causal_conv1d)
    assert got["weight"].dtype == jnp.float32
    close(got, want, 6e-3)


def test_nan_stays_in_its_own_sequence():
    arrays, offsets = drawn(lengths=(20, 30, 20), state=True)
    spoiled = arrays | {"x": arrays["x"].at[:, 48].set(jnp.nan)}
    outside_it = jnp.r_[0:20, 50:70]
    run = by_kernels(functools.partial(causal_conv1d, cu_seqlens=offsets, activation="silu"))
    gradient = jax.grad(lambda arrays: jnp.sum(run(**arrays)[:, outside_it]))
    np.testing.assert_array_equal(run(**spoiled)[:, outside_it], run(**arrays)[:, outside_it])
    np.testing.assert_array_equal(gradient(spoiled)["x"][:, outside_it], gradient(arrays)["x"][:, outside_it])


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("empty", [1, 3])
def test_nan_in_the_state_of_an_empty_sequence_changes_no_gradient(empty, kernels):
    arrays, offsets = drawn(shape=(1, 0, 5), lengths=(10, 0, 10, 0), state=True)
    arrays["x"] = jnp.pad(arrays["x"], [(0, 0), (0, 2), (0, 0)])  # the last two tokens are in no sequence
    spoiled = arrays | {"initial_state": arrays["initial_state"].at[empty].set(jnp.nan)}
    loss = lambda arrays, offsets: jnp.sum(causal_conv1d(**arrays, cu_seqlens=offsets, activation="silu"))
    run = lambda arrays: jax.jit(jax.grad(lambda *args: loss(*args)))(arrays, offsets)
    run = by_kernels(run) if kernels else run
    jax.tree.map(np.testing.assert_array_equal, run(spoiled), run(arrays))


def test_extreme_sums():
    x = jnp.full((1, 20, 3), jnp.array([1e30, -1e30, -300.0]))
    run = functools.partial(causal_conv1d, activation="silu")
    got, want = both({"x": x, "weight": jnp.ones((1, 3))}, by_kernels(run)), both({"x": x, "weight": jnp.ones((1, 3))}, run)
    assert all(jnp.isfinite(y).all() for y in got.values())
    close(got, want)


def test_which_calls_take_the_kernels():
    gpu, of = Device("gpu", "NVIDIA H200", 90), jax.ShapeDtypeStruct
    arrays = {"x": of((2, 17, 5), jnp.bfloat16), "weight": of((4, 5), jnp.float32)}
    assert covers(gpu, arrays)
    assert not covers(Device("cpu", "cpu"), arrays)
    assert not covers(Device("gpu", "Tesla T4", 75), arrays)
    assert not covers(gpu, arrays | {"x": of((2, 16, 5), jnp.bfloat16)})  # a decoder's steps
    assert not covers(gpu, arrays | {"weight": of((9, 5), jnp.float32)})
    assert not covers(gpu, arrays | {"x": of((2, 17, 5), jnp.float64)})
    assert not covers(gpu, arrays | {"x": of((*jax.export.symbolic_shape("b, t"), 5), jnp.bfloat16)})


def test_a_call_launches_one_kernel_and_its_gradient_another():
    arrays, _ = drawn()
    loss = lambda arrays: jnp.sum(causal_conv1d(**arrays))
    assert launches(loss, arrays) == 1
    assert launches(jax.value_and_grad(loss), arrays) == 2
    assert launches(loss, arrays | {"x": arrays["x"][:, :3]}) == 0


def test_the_gradient_keeps_the_inputs_alone():
    arrays, _ = drawn(bias=False)
    with compile_for(90):
        kept = jax.tree.leaves(jax.vjp(functools.partial(causal_conv1d, activation="silu"), *arrays.values())[1])
    assert sum(array.nbytes for array in kept) <= sum(x.nbytes for x in arrays.values())


@pytest.mark.parametrize("lengths", [None, PACKED])
def test_forward_mode_and_second_derivatives(lengths):
    arrays, offsets = drawn(shape=(2, 20, 5), lengths=lengths, state=True)
    loss = lambda arrays: jnp.sum(jnp.sin(causal_conv1d(**arrays, cu_seqlens=offsets, activation="silu")))
    forward = lambda arrays: jax.jvp(loss, (arrays,), (arrays,))[1]
    second = jax.grad(lambda arrays: sum(jnp.sum(g**2) for g in jax.grad(loss)(arrays).values()))
    step = lambda arrays: lambda sum, x: (sum + loss({**arrays, "x": x}), None)
    steps = lambda arrays: jax.lax.scan(step(arrays), 0.0, jnp.stack([arrays["x"], arrays["x"] / 2]))[0]
    in_a_scan = lambda arrays: jax.jvp(jax.grad(steps), (arrays,), (arrays,))[1]  # whose gradient forgets rules of its calls
    for function in (forward, second, jax.grad(jax.checkpoint(loss)), in_a_scan):
        close(*kernels_and_xla(function, arrays), 1e-5)


MAPPED = {
    "inputs": {"x": 0, "weight": None, "bias": None, "initial_state": None},
    "inputs and states": {"x": 1, "weight": None, "bias": None, "initial_state": 0},
    "weights": {"x": None, "weight": 0, "bias": None, "initial_state": None},
    "everything": {"x": 0, "weight": 0, "bias": 0, "initial_state": 0},
}


@pytest.mark.parametrize("lengths", [None, PACKED])
@pytest.mark.parametrize("name", MAPPED)
def test_vmap(name, lengths):
    arrays, offsets = drawn(shape=(2, 20, 5), lengths=lengths, state=True)
    axes = MAPPED[name]
    wide = {n: x if axes[n] is None else jnp.stack([x, 2 * x, x + 1], axes[n]) for n, x in arrays.items()}
    run = functools.partial(causal_conv1d, cu_seqlens=offsets, activation="silu")
    mapped = lambda arrays: jax.vmap(lambda arrays: both(arrays, run), (axes,))(arrays)
    close(*kernels_and_xla(mapped, wide), 1e-5)


def test_vmap_over_inputs_is_one_call():
    arrays, _ = drawn(shape=(2, 20, 5))
    wide = arrays | {"x": jnp.stack([arrays["x"]] * 3)}
    axes = {name: 0 if name == "x" else None for name in arrays}
    mapped = jax.vmap(lambda arrays: both(arrays, causal_conv1d), (axes,))
    assert launches(mapped, wide) == 2
    none = {name: x[:0] if name == "x" else x for name, x in wide.items()}
    assert by_kernels(mapped)(none)["outputs"].shape == (0, 2, 20, 5)


def test_shard_map_sums_the_gradient_of_shared_weights():
    mesh, one = Mesh(np.array(jax.devices()[:1]), ("x",)), drawn(shape=(1, 20, 5))[0]
    run = lambda x, weight: causal_conv1d(x, weight, activation="silu")
    P = PartitionSpec
    split = jax.shard_map(run, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"))
    loss = lambda weight, run: jnp.sum(jnp.sin(run(one["x"], weight)))
    close(by_kernels(jax.grad(loss))(one["weight"], split), jax.grad(loss)(one["weight"], run))


def test_a_mesh_with_explicit_axes():
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Explicit,))
    arrays, offsets = drawn(lengths=PACKED, state=True)
    want = causal_conv1d(**arrays, cu_seqlens=offsets, return_state=True)
    with jax.set_mesh(mesh), compile_for(90):
        place = lambda x: NamedSharding(mesh, PartitionSpec(*[None] * (x.ndim - 1), "x"))
        split = {name: jax.device_put(x, place(x)) for name, x in arrays.items()}
        got = causal_conv1d(**split, cu_seqlens=offsets, return_state=True)
        assert got[0].sharding.spec == PartitionSpec(None, None, "x")
    close(got, want)


SPLIT = """
import json, sys
import jax, jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from ejkernel.callib import compile_for
from ejkernel.modules import causal_conv1d
from ejkernel.testing.compare import relative_rms
from tests.sharding.partitions import sent

mesh = jax.make_mesh((2, 2), ("b", "c"), axis_types=(AxisType.Auto,) * 2)
key = jax.random.key(0)
shapes = {"x": (4, 20, 6), "weight": (3, 6), "bias": (6,)}
specs = {"x": P("b", None, "c"), "weight": P(None, "c"), "bias": P("c")}
arrays = {name: jax.random.normal(key, shape) for name, shape in shapes.items()}
placed = {name: jax.device_put(x, NamedSharding(mesh, specs[name])) for name, x in arrays.items()}

def both(arrays):
    y, pull = jax.vjp(lambda a: causal_conv1d(**a, activation="silu"), arrays)
    return {"y": y, **pull(jnp.cos(y))[0]}

want = jax.jit(both)(arrays)
with compile_for(90):
    program = jax.jit(lambda arrays: both(arrays)).lower(placed).compile()
got = program(placed)
errors = {name: relative_rms(got[name], want[name]) for name in want}
print(json.dumps([errors, sent(program.as_text()), str(got["x"].sharding.spec)]))
"""


def test_split_over_four_devices():
    """Batch and channels are split: nothing is gathered, and the gradients of weights are summed over the batch."""
    variables = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "TRITON_INTERPRET": "1"}
    errors, collectives, spec = json.loads(outside("-c", SPLIT, environment=variables))
    assert max(errors.values()) < 2e-6, errors
    assert set(collectives) == {"all-reduce"}
    assert "'b'" in spec
    assert "'c'" in spec


ON_ONE = """
import jax, jax.numpy as jnp
from ejkernel.callib import compile_for
from ejkernel.modules import causal_conv1d

with compile_for(90):
    print(jax.grad(lambda x: jnp.sum(causal_conv1d(x, jnp.ones((4, 6)))))(jnp.ones((2, 20, 6)))[0, 0, 0])
"""


def test_the_gradient_alone_on_one_of_four_devices():
    """Where XLA may split a program it takes the call: a kernel inside a linear map could not say how it splits."""
    variables = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "TRITON_INTERPRET": "1"}
    assert float(outside("-c", ON_ONE, environment=variables)) == 4
