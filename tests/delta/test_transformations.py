"""The delta rule under JAX's transformations, on meshes, and with JAX's stricter settings."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from ejkernel._device import Device, on_device
from ejkernel.kernels._delta import GatedDeltaRuleConfig
from ejkernel.kernels._xla.gated_delta_rule import gated_delta_rule
from ejkernel.testing.compare import assert_close, relative_rms
from ejkernel.testing.delta_cases import DeltaCase
from ejkernel.testing.delta_reference import delta_reference

CHUNKED, RECURRENT = GatedDeltaRuleConfig("chunked", 8), GatedDeltaRuleConfig("recurrent", 8)
SMALL = {"key_channels": 4, "value_channels": 3, "initial_state": True}
CASE = DeltaCase("case", batch=2, time=11, gate="channel", heads=2, key_heads=1, **SMALL)
PACKED = DeltaCase("packed", gate="head", lengths=(6, 0, 9), **SMALL)
operation = functools.partial(gated_delta_rule, cfg=CHUNKED)
total = lambda found: sum(jnp.sum(jnp.sin(x)) for x in found)


@pytest.mark.parametrize("case", [CASE, PACKED], ids=str)
def test_eager_equals_the_reference(case):
    want = case.expected()
    assert_close(case.evaluate(operation, jit=False), want, case.tolerance)


def test_traced_cu_seqlens_serve_other_lengths_without_recompiling():
    run = jax.jit(lambda arrays, cu: operation(**arrays, cu_seqlens=cu))
    for lengths in ((6, 0, 9), (15, 0, 0), (0, 1, 14)):
        case = DeltaCase("lengths", gate="head", lengths=lengths, **SMALL)
        arrays, options = case.arguments()
        want = case.expected()
        for got, name in zip(run(arrays, options["cu_seqlens"]), ("output", "state"), strict=True):
            assert relative_rms(got, want[name]) < 2e-6
    assert run._cache_size() == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("lengths", [(5, 10, 0), (9, 0, 0)], ids=str)
def test_empty_sequences_at_the_end_on_other_devices(lengths):
    """Where chunks that nothing uses are computed like the others, and must not take the place of an empty sequence's."""
    case = DeltaCase("ends-empty", gate="head", lengths=lengths, **SMALL)
    with on_device(Device("gpu", "a GPU", 90)):
        got = case.evaluate(operation)
    assert_close(got, case.expected(), case.tolerance)


def test_what_lies_after_the_last_sequence_changes_nothing():
    """Traced offsets may end before the row does: a buffer of fixed size that is not full."""
    arrays, options = PACKED.arguments()
    longer = lambda x: jnp.pad(x, [(0, 0), (0, 4), *[(0, 0)] * (x.ndim - 2)], constant_values=jnp.nan)
    padded = {name: x if name == "initial_state" else longer(x) for name, x in arrays.items()}
    run = jax.jit(jax.grad(lambda arrays, cu: total(operation(**arrays, cu_seqlens=cu))))
    got, want = run(padded, options["cu_seqlens"]), slope(PACKED)(arrays)
    for name in arrays:
        assert relative_rms(got[name][:, :15] if name != "initial_state" else got[name], want[name]) < 1e-6
        assert name == "initial_state" or not got[name][:, 15:].any()


@functools.cache
def slope(case: DeltaCase):
    """The gradient of everything a case returns: what the transformed ones are compared with, compiled once."""
    options = case.arguments()[1]
    return jax.jit(jax.grad(lambda arrays: total(operation(**arrays, **options))))


@pytest.mark.parametrize("mapped", [("query",), ("initial_state",), ("key", "value"), ("beta", "g")], ids="-".join)
def test_vmap_over_some_arguments(mapped):
    """Results that do not depend on what is mapped are the same for all; gradients of what is shared add up."""
    arrays, options = CASE.arguments()
    both = {name: jnp.stack([x, 0.5 * x]) if name in mapped else x for name, x in arrays.items()}
    axes = {name: 0 if name in mapped else None for name in arrays}
    together = lambda both: total(jax.vmap(lambda arrays: operation(**arrays, **options), (axes,))(both))
    each = [slope(CASE)({name: x[i] if name in mapped else x for name, x in both.items()}) for i in range(2)]
    want = {name: jnp.stack([e[name] for e in each]) if name in mapped else each[0][name] + each[1][name] for name in arrays}
    got = jax.jit(jax.grad(together))(both)
    assert all(relative_rms(got[name], want[name]) < 1e-5 for name in arrays)
    moved = jax.jit(lambda both: jax.jvp(together, (both,), (both,))[1])(both)
    np.testing.assert_allclose(moved, sum(jnp.vdot(want[name], both[name]) for name in arrays), rtol=1e-4, atol=1e-4)


def test_vmap_outside_the_gradient_and_over_offsets():
    arrays, _ = PACKED.arguments()
    offsets = jnp.array([[0, 6, 6, 15], [0, 1, 14, 15]], jnp.int32)
    gradient = jax.grad(lambda arrays, cu: total(operation(**arrays, cu_seqlens=cu)))
    got, one = jax.jit(jax.vmap(gradient, (None, 0)))(arrays, offsets), jax.jit(gradient)
    for i in range(2):
        want = one(arrays, offsets[i])
        assert all(relative_rms(got[name][i], want[name]) < 1e-5 for name in arrays)


def test_vmap_over_offsets_inside_shard_map():
    arrays, _ = PACKED.arguments()
    offsets = jnp.array([[0, 6, 6, 15], [0, 1, 14, 15]], jnp.int32)
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = {name: jnp.stack([x, -x]) if name == "value" else jnp.stack([x, x]) for name, x in arrays.items()}
    whole = jax.vmap(lambda arrays, cu: operation(**arrays, cu_seqlens=cu))
    split = jax.shard_map(whole, mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x"))
    got, want = (jax.jit(jax.grad(lambda rows: total(call(rows, offsets))))(rows) for call in (split, whole))  # noqa: B023
    assert all(relative_rms(got[name], want[name]) < 1e-6 for name in arrays)


@pytest.mark.long
@pytest.mark.parametrize(
    ("case", "cfg", "outer"),
    [(CASE, CHUNKED, (jax.grad, jax.jacfwd)), (PACKED, RECURRENT, (jax.jacfwd,))],
    ids=["dense", "packed-steps"],
)
def test_derivatives_of_derivatives(case, cfg, outer):
    arrays, options = case.arguments()

    def along(function, arrays):
        return lambda s: total(function(**{n: x * (1 + s * i) for i, (n, x) in enumerate(arrays.items())}, **options))

    with jax.enable_x64(True):
        wide = {name: jnp.asarray(np.asarray(x, np.float64)) for name, x in arrays.items()}
        want = float(jax.jit(jax.grad(jax.grad(along(delta_reference, wide))))(0.1))
    ours = along(functools.partial(gated_delta_rule, cfg=cfg), arrays)
    for derivative in outer:
        np.testing.assert_allclose(jax.jit(derivative(jax.grad(ours)))(0.1), want, rtol=1e-4)


def test_checkpointed_layers_in_a_scan():
    arrays, options = CASE.arguments()
    call = lambda arrays: total(operation(**arrays, **options))
    once = slope(CASE)(arrays)
    layer = lambda a, s: jax.checkpoint(call)({name: x * s for name, x in a.items()})
    layers = lambda a: jax.lax.scan(lambda y, s: (y + layer(a, s), None), 0.0, jnp.ones(2))[0]
    twice = jax.jit(jax.grad(layers))(arrays)
    assert all(relative_rms(twice[name], 2 * once[name]) < 1e-5 for name in arrays)


@pytest.mark.parametrize("shared", [("query", "beta"), ("key", "g"), ("value", "initial_state")], ids="-".join)
def test_shard_map_sums_the_gradient_of_what_is_shared(shared):
    mesh = Mesh(np.array(jax.devices()[:1]), ("x",))
    arrays, options = CASE.arguments()
    specs = {name: PartitionSpec() if name in shared else PartitionSpec("x") for name in arrays}
    call = lambda arrays: operation(**arrays, **options)
    split = jax.shard_map(call, mesh=mesh, in_specs=(specs,), out_specs=(PartitionSpec("x"), PartitionSpec("x")))
    got, want = jax.jit(jax.grad(lambda arrays: total(split(arrays))))(arrays), slope(CASE)(arrays)
    assert all(relative_rms(got[name], want[name]) < 1e-5 for name in arrays)


@pytest.mark.parametrize("case", [CASE, PACKED], ids=str)
def test_a_mesh_with_explicit_axes(case):
    mesh = jax.make_mesh((1, 1), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    arrays, options = case.arguments()
    want = slope(case)(arrays)
    data = None if case.lengths else "data"
    place = lambda name: PartitionSpec(data, "model") if name == "initial_state" else PartitionSpec(data, None, "model")
    with jax.set_mesh(mesh):
        split = {name: jax.device_put(x, NamedSharding(mesh, place(name))) for name, x in arrays.items()}
        output, state = operation(**split, **options)
        assert output.sharding.spec[2] == "model"
        assert state.sharding.spec[1] == "model"
        got = jax.jit(jax.grad(lambda arrays: total(operation(**arrays, **options))))(split)
        over_time = jax.device_put(arrays["value"], NamedSharding(mesh, PartitionSpec(None, "data")))
        with pytest.raises(ValueError, match="value is split over time"):
            operation(**(split | {"value": over_time}), **options)
    assert all(relative_rms(got[name], want[name]) < 1e-5 for name in arrays)


def test_symbolic_sizes_can_be_exported():
    arrays, options = CASE.arguments()
    batch, time = jax.export.symbolic_shape("b, t")
    leading = lambda name: (batch,) if name == "initial_state" else (batch, time)
    sizes = {name: (*leading(name), *x.shape[len(leading(name)) :]) for name, x in arrays.items()}
    run = jax.jit(jax.grad(lambda arrays: total(gated_delta_rule(**arrays, **options))))
    exported = jax.export.export(run)({name: jax.ShapeDtypeStruct(size, jnp.float32) for name, size in sizes.items()})
    got, want = exported.call(arrays), slope(CASE)(arrays)
    assert all(relative_rms(got[name], want[name]) < 1e-5 for name in arrays)


SETTINGS = {"dtypes": (jax.numpy_dtype_promotion, "strict"), "ranks": (jax.numpy_rank_promotion, "raise")}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("gate", ["head", "channel"])
def test_strict_promotion(setting, gate):
    case = DeltaCase("strict", gate=gate, lengths=(6, 0, 9), heads=4, l2norm=True, dtype="bfloat16", **SMALL)
    arrays, options = case.arguments()
    options["softmax_scale"] = jnp.float32(0.3)
    promotion, value = SETTINGS[setting]
    with promotion(value):
        run = lambda arrays: operation(**arrays, **options)
        jax.jit(lambda arrays: jax.vjp(run, arrays)[1](run(arrays))).lower(arrays)
        jax.jit(lambda arrays: gated_delta_rule(**arrays, **options, cfg=RECURRENT)).lower(arrays)


def test_without_jit():
    arrays, options = CASE.arguments()
    with jax.disable_jit():
        got = operation(**arrays, **options)
    for x, y in zip(got, operation(**arrays, **options), strict=True):
        assert relative_rms(x, y) < 2e-6


def test_a_traced_scale_equals_a_number_and_has_a_gradient():
    arrays, _ = DeltaCase("scaled", gate="head", dtype="bfloat16").arguments()
    run = lambda scale: operation(**arrays, softmax_scale=scale)[0].astype(jnp.float32)
    assert relative_rms(jax.jit(run)(jnp.float32(0.3)), run(0.3)) < 4e-3
    slope = jax.grad(lambda scale: jnp.sum(run(scale)))(jnp.float32(0.3))
    np.testing.assert_allclose(slope, jnp.sum(run(1.0)), rtol=1e-2)


def test_nothing_leaks_from_a_trace():
    with jax.check_tracer_leaks():
        arrays, options = CASE.arguments()
        jax.jit(jax.grad(lambda arrays: total(operation(**arrays, **options))))(arrays)
