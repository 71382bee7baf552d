"""Kernels by warpgroups, interpreted as on an H200: values and gradients against float64, and no access without an order.

The interpreter raises where partitions touch the same memory and no barrier says which is first, so every case here tests the
kernels' barriers, too (test_gluon.py in tests/callib has what it finds).
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")
pytest.importorskip("triton.experimental.gluon", reason="this Triton has no Gluon")

from ejkernel._device import Device, device_of, on_device
from ejkernel.kernels._delta import GatedDeltaRuleConfig
from ejkernel.kernels._triton import gated_delta_rule
from ejkernel.kernels._triton.gated_delta_rule._plan import delta_plan
from ejkernel.kernels._triton.gated_delta_rule._platform import TritonDeltaRule
from ejkernel.kernels._triton.gated_delta_rule.routes import route_of as route_of_delta
from ejkernel.kernels._triton.linear._solve import solve_along
from ejkernel.kernels._triton.linear.routes import axis, head_gate, route_of
from ejkernel.testing.compare import LINEAR_TOLERANCES, assert_close, relative_rms
from ejkernel.testing.delta_cases import DeltaCase
from tests.triton.along import plan_of, run_along
from tests.triton.linear_cases import Case
from tests.triton.linear_reference import value_and_grads

pytestmark = pytest.mark.skipif(device_of(()).backend != "cpu", reason="where there is a GPU, test_gpu.py runs them compiled")
H200 = Device("gpu", "NVIDIA H200", 90)
BF16 = {"dtype": "bfloat16", "block_q": 64, "state": True}
KEY = {**BF16, "gate_dtype": "bfloat16"}
LENGTHS = (0, 5, 5, 135, 200, 201)  # an empty sequence, one of a token, one of more chunks than a ring has slots
HEAD_SCAN, HEAD_GRADIENTS = "head_gate_scan_by_warpgroups", "head_gate_backward_by_warpgroups"
WIDE_SCAN = "wide_scan_by_warpgroups"
KEY_SCAN, KEY_ENDS, KEY_GRADIENTS = "key_gate_scan_by_warpgroups", "key_gate_segment_ends", "weak_axis_by_warpgroups"
KEY_AND_VALUE_SCAN, KEY_AND_VALUE_GRADIENTS = "key_value_scan_by_warpgroups", "weak_axis_from_rows_by_warpgroups"


def errors_along(case: Case, **of_plan) -> dict[str, float]:
    with on_device(H200):
        values, grads = jax.block_until_ready(run_along(case, route_of(plan_of(case, **of_plan))))
    want, want_grads = value_and_grads(case.arrays(), case.weights(), case.shape[4] ** -0.5, case.reverse, case.cu_seqlens)
    errors = {"output": relative_rms(values[0], want[0]), "final state": relative_rms(values[1], want[1])}
    return errors | {f"d{name}": relative_rms(grads[name], want_grads[name]) for name in grads}


HEAD_GATE = [
    *(Case(gates, "mild", (1, 320, 2, 1, K, V), **BF16) for gates in ((), ("g",)) for K, V in ((64, 128), (128, 64))),
    Case(("g",), "-inf", (2, 129, 2, 2, 64, 64), gate_heads="Hkv", reverse=True, **BF16),
    Case(("g", "g_gamma"), "resets", (1, 201, 2, 1, 128, 128), cu_seqlens=LENGTHS, **BF16),
    Case(("g",), "near -20", (1, 201, 2, 2, 64, 64), cu_seqlens=LENGTHS, reverse=True, **BF16),
    Case(("g",), "positive", (1, 130, 1, 1, 128, 128), **BF16),
]


@pytest.mark.parametrize("case", HEAD_GATE, ids=str)
def test_one_gate_per_head(case, launched):
    errors = errors_along(case)
    assert launched == ({HEAD_SCAN, HEAD_GRADIENTS} if "g" in case.gates else {HEAD_SCAN})
    assert max(errors.values()) < LINEAR_TOLERANCES["bfloat16"][0], errors


KEY_GATE = [
    Case(("gk",), "mild", (1, 320, 2, 1, 64, 128), **KEY),
    Case(("gk",), "mild", (2, 200, 2, 2, 128, 64), reverse=True, gate_heads="Hkv", **KEY),
    Case(("gk",), "mild", (1, 201, 2, 1, 128, 128), cu_seqlens=LENGTHS, reverse=True, **KEY),
    Case(("gk",), "resets in one head", (1, 256, 2, 2, 64, 64), **KEY),
    Case(("gk",), "at sequences' beginnings", (1, 201, 2, 2, 64, 64), cu_seqlens=LENGTHS, **KEY),
]


@pytest.mark.parametrize("case", KEY_GATE, ids=str)
def test_a_gate_per_key_channel(case, launched):
    errors = errors_along(case)
    assert launched >= {KEY_SCAN, KEY_GRADIENTS}
    assert max(errors.values()) < LINEAR_TOLERANCES["bfloat16"][0], errors


KEY_AND_VALUE_GATE = [
    Case(("gk", "gv"), "resets now and then", (1, 128, 1, 1, 128, 128), **{**KEY, "state": False}),
    Case(("gk", "gv"), "mild", (1, 70, 2, 1, 64, 128), cu_seqlens=(0, 5, 5, 70), **KEY),
    Case(("gk", "gv"), "mild", (1, 65, 1, 1, 128, 64), reverse=True, **KEY),
    Case(("gk", "gv"), "mild", (1, 130, 1, 1, 64, 64), **KEY),
]


@pytest.mark.parametrize("case", KEY_AND_VALUE_GATE, ids=str)
def test_gates_per_key_and_value_channel(case, launched):
    """Every operand is high and low part: results round just once."""
    errors = errors_along(case)
    assert launched == {KEY_AND_VALUE_GRADIENTS} | ({KEY_AND_VALUE_SCAN} if case.shape[4:] == (128, 128) else set())
    assert max(errors.values()) < 1.75e-3, errors


KEY_AND_VALUE_SCANS = [
    (Case(("gk", "gv"), "-inf", (1, 70, 1, 1, 128, 128), cu_seqlens=(0, 5, 5, 70), reverse=True, **KEY), None),
    (Case(("g", "gk", "gv"), "mild", (1, 128, 2, 1, 128, 128), **{**KEY, "state": False}), 1),
]


@pytest.mark.parametrize(("case", "segment"), KEY_AND_VALUE_SCANS, ids=str)
def test_scans_with_gates_per_key_and_value_channel(case, segment, launched):
    """Forward alone, whole sequences and in segments."""
    with on_device(H200):
        route = route_of(plan_of(case, segment=segment))
        cu_seqlens = None if case.cu_seqlens is None else jnp.array(case.cu_seqlens)
        found = jax.block_until_ready(solve_along(route, case.arrays(), cu_seqlens))
    wanted, _ = value_and_grads(case.arrays(), case.weights(), case.shape[4] ** -0.5, case.reverse, case.cu_seqlens)
    assert launched == {KEY_AND_VALUE_SCAN}
    for got, want in zip(found, wanted, strict=True):
        assert relative_rms(got, want) < 1.75e-3


@pytest.fixture
def one_program(monkeypatch):
    """Kernels that fill the device with programs start one, which takes all chunks."""
    for route in (axis, head_gate):
        monkeypatch.setattr(route, "MULTIPROCESSORS", 1)
    jax.clear_caches()  # where what is traced is kept by its plan
    yield
    jax.clear_caches()


MANY_CHUNKS = [
    (Case(("g",), "resets", (1, 310, 1, 1, 64, 64), **BF16), HEAD_GRADIENTS),
    (Case(("gk",), "resets now and then", (1, 310, 1, 1, 64, 128), **KEY), KEY_GRADIENTS),
    (Case(("gk", "gv"), "mild", (1, 310, 1, 1, 64, 64), **KEY), KEY_AND_VALUE_GRADIENTS),
    (Case(("gk", "gv"), "resets now and then", (1, 150, 1, 1, 128, 128), **KEY), KEY_AND_VALUE_GRADIENTS),
]


@pytest.mark.parametrize(("case", "kernel"), MANY_CHUNKS, ids=str)
def test_programs_of_many_chunks(case, kernel, launched, one_program):
    """Slots are filled again, and chunks that are not weakly gated passed over. Of a whole device's programs each would have
    one chunk here."""
    errors = errors_along(case)
    assert kernel in launched
    assert max(errors.values()) < LINEAR_TOLERANCES["bfloat16"][0], errors


SPOILED = [
    (Case(("g",), "mild", (1, 100, 1, 1, 256, 128), cu_seqlens=(0, 70, 100), **BF16), (WIDE_SCAN,)),
    (
        Case(("gk", "gv"), "mild", (1, 100, 1, 1, 128, 128), cu_seqlens=(0, 70, 100), **KEY),
        (KEY_AND_VALUE_SCAN, KEY_AND_VALUE_GRADIENTS),
    ),
]


@pytest.mark.parametrize(("case", "kernels"), SPOILED, ids=str)
def test_nan_stays_in_its_sequence(case, kernels, launched, one_program):
    """In the second of two packed ones, which begins within what would be the first one's last chunk."""
    first = case.cu_seqlens[1]

    def run(spoil: float) -> list[jax.Array]:
        """What belongs to the first sequence, where numbers of the second are spoiled."""
        arrays = case.arrays()
        arrays |= {name: arrays[name].at[:, first:].add(spoil) for name in ("query", "key", "value")}
        arrays["initial_state"] = arrays["initial_state"].at[1].add(spoil)
        route = route_of(plan_of(case, segment=1))
        values, pull = jax.vjp(lambda arrays: solve_along(route, arrays, jnp.array(case.cu_seqlens)), arrays)
        output, state = values
        assert jnp.isfinite(output[:, first:]).all() == jnp.isfinite(state[1]).all() == (spoil == 0)
        return [x[:1] if len(x) > 1 else x[:, :first] for x in jax.tree.leaves((values, pull(values)))]

    with on_device(H200):
        clean, spoiled = run(0.0), run(jnp.nan)
    assert launched >= set(kernels)
    for got, want in zip(spoiled, clean, strict=True):
        np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


SPLIT = {
    HEAD_SCAN: Case(("g",), "resets now and then", (1, 400, 1, 1, 128, 64), **BF16),
    KEY_SCAN: Case(("gk",), "mild", (1, 400, 1, 1, 64, 64), reverse=True, **KEY),
    KEY_ENDS: Case(("gk",), "resets now and then", (1, 384, 1, 1, 128, 128), **KEY),
}


@pytest.mark.parametrize("kernel", SPLIT)
def test_sequences_in_segments(kernel, launched):
    """Some of them weakly gated, others not."""
    errors = errors_along(SPLIT[kernel], min_segment=2)
    assert kernel in launched
    assert (KEY_ENDS in launched) == ("gk" in SPLIT[kernel].gates)
    assert max(errors.values()) < LINEAR_TOLERANCES["bfloat16"][0], errors


PACKED = [
    Case(("g",), "mild", (1, 300, 2, 1, 64, 64), cu_seqlens=(0, 5, 5, 200, 300), **BF16),
    Case(("g",), "-inf", (1, 300, 1, 1, 64, 64), cu_seqlens=(0, 70, 70, 300), reverse=True, **BF16),
]


@pytest.mark.parametrize("case", PACKED, ids=str)
def test_packed_sequences_in_segments(case, launched, monkeypatch):
    """Which combine the ends before them, however many they are."""
    monkeypatch.delattr(head_gate, "starts_of_segments")
    errors = errors_along(case, segment=1)
    assert HEAD_SCAN in launched
    assert max(errors.values()) < LINEAR_TOLERANCES["bfloat16"][0], errors


WIDE = [
    Case(("g",), "resets", (1, 200, 2, 1, 256, 128), reverse=True, **BF16),
    Case(("g",), "mild", (1, 128, 1, 1, 256, 256), **{**BF16, "state": False}),
    Case(("g_gamma",), "mild", (1, 201, 1, 1, 256, 128), cu_seqlens=LENGTHS, **BF16),
    Case(("gk",), "mild", (1, 256, 1, 1, 256, 128), **KEY),
    Case(("gk",), "-inf", (1, 201, 2, 2, 256, 128), cu_seqlens=LENGTHS, reverse=True, **KEY),
]


@pytest.mark.parametrize(("case", "segment"), [*((case, None) for case in WIDE), (WIDE[0], 1), (WIDE[3], 2)], ids=str)
def test_scans_of_wide_keys(case, segment, launched):
    """Whole sequences, and in segments."""
    errors = errors_along(case, segment=segment)
    assert launched == {WIDE_SCAN}
    assert max(errors.values()) < LINEAR_TOLERANCES["bfloat16"][0], errors


STARTS = [
    Case(("g",), "resets now and then", (1, 400, 1, 1, 64, 64), **BF16),
    Case((), "mild", (2, 256, 1, 1, 128, 64), reverse=True, **{**BF16, "state": False}),
    Case(("g_gamma",), "mild", (1, 320, 2, 1, 64, 64), **BF16),
]


@pytest.mark.parametrize("case", STARTS, ids=str)
def test_what_segments_start_from_made_once(case, monkeypatch):
    """Of seven, four and five segments: the results are those of scans that combine ends themselves."""
    adjoint, made = set(), head_gate.starts_of_segments

    def noted(*args, **options):
        adjoint.add(options["adjoint"])
        return made(*args, **options)

    monkeypatch.setattr(head_gate, "starts_of_segments", noted)
    with on_device(H200):
        run = lambda: jax.block_until_ready(run_along(case, route_of(plan_of(case, segment=1))))
        once = run()
        assert adjoint == {False, True}
        adjoint.clear()
        monkeypatch.setattr(head_gate, "MANY_SEGMENTS", 8)
        jax.clear_caches()  # where what is traced is kept by its plan
        combined = run()
    jax.clear_caches()
    assert not adjoint
    for got, want in zip(jax.tree.leaves(once), jax.tree.leaves(combined), strict=True):
        assert relative_rms(got, want) < 1e-6


@pytest.mark.parametrize("gates", [(), ("g",), ("gk",)], ids=lambda gates: "".join(gates) or "none")
def test_vmap_of_a_gradient_in_segments(gates):
    """Over cotangents alone the backward pass has another batch than the forward pass, and along other segments by itself."""
    case = Case(gates, "mild", (1, 256, 2, 1, 64, 64), **{**KEY, "state": False})
    arrays = case.arrays()

    def pulled(arrays, cotangents):
        route = route_of(plan_of(case, min_segment=2))
        return jax.vmap(jax.vjp(lambda arrays: solve_along(route, arrays, None)[0], arrays)[1])(cotangents)

    adjoints = jnp.stack([case.weights()[0].astype(jnp.bfloat16) * x for x in range(1, 9)])
    with on_device(H200):
        (found,) = jax.block_until_ready(pulled(arrays, adjoints))
    state = jnp.zeros((1, 2, 64, 64))
    _, want = value_and_grads(arrays, (adjoints[0], state), 64**-0.5, False, None)
    for name in arrays:
        for x in (0, 7):
            assert relative_rms(found[name][x], want[name] * (x + 1)) < LINEAR_TOLERANCES["bfloat16"][0], (name, x)


_SIZES = ((64, 64), (128, 64), (64, 128), (128, 128))
DELTA = [
    DeltaCase(
        f"{gate}-{K}x{V}", batch=1, heads=2, key_heads=1, key_channels=K, value_channels=V, gate=gate, initial_state=True,
        dtype="bfloat16", reverse=K != V, **({"lengths": (70, 0, 1, 64)} if (gate == "head") == (K == V) else {"time": 200}),
    )
    for gate, (K, V) in itertools.product((None, "head", "channel"), _SIZES)
]  # fmt: skip
DELTA_SCANS = {"delta_scan_by_warpgroups", "delta_adjoint_scan_by_warpgroups"}
DELTA_KERNELS = {None: DELTA_SCANS, "head": DELTA_SCANS, "channel": {*DELTA_SCANS, "delta_correction_in_registers"}}


@pytest.mark.parametrize("case", DELTA, ids=str)
def test_the_delta_rule(case, launched):
    with on_device(H200):
        found = jax.block_until_ready(case.evaluate(gated_delta_rule))
    assert launched == DELTA_KERNELS[case.gate]
    assert_close(found, case.expected(), case.tolerance)


@pytest.mark.parametrize("gate", [None, "head", "channel"])
def test_the_delta_rule_in_segments(gate, launched, monkeypatch):
    def taken(self, problem, cfg):
        return route_of_delta(dataclasses.replace(delta_plan(problem, cfg), segment=1))

    monkeypatch.setattr(TritonDeltaRule, "taken", taken)
    case = DeltaCase("split", batch=1, time=200, key_channels=64, value_channels=64, gate=gate, dtype="bfloat16")
    cfg = GatedDeltaRuleConfig("chunked", 64)
    with on_device(H200):
        found = jax.block_until_ready(case.evaluate(functools.partial(gated_delta_rule, cfg=cfg)))
    assert launched == DELTA_KERNELS[case.gate]
    assert_close(found, case.expected(), case.tolerance)
