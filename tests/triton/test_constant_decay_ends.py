"""Segments' ends where every step of a head decays alike: chunks of which nothing can be left are not read."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")

import triton
import triton.language as tl

from ejkernel._device import Device, device_of, on_device
from ejkernel.callib import Launch, instead_of_launching, triton_call
from ejkernel.kernels._triton.linear._solve import solve_along
from ejkernel.kernels._triton.linear.kernels.head_decays import constant_decay
from ejkernel.kernels._triton.linear.kernels.state_scan import _first_that_counts
from ejkernel.kernels._triton.linear.routes import route_of
from ejkernel.testing.compare import LINEAR_TOLERANCES, relative_rms
from tests.triton.along import plan_of, run_along
from tests.triton.linear_cases import Case
from tests.triton.linear_reference import value_and_grads

pytestmark = pytest.mark.skipif(device_of(()).backend != "cpu", reason="interpreted on the host")
SEGMENT = 10  # chunks of 16 rows
DENSE = Case(("g_gamma",), shape=(1, 16 * 2 * SEGMENT, 5, 5, 16, 16), state=True)
PACKED = Case(("g_gamma",), shape=(1, 16 * 24, 5, 5, 16, 16), cu_seqlens=(0, 350, 350, 384), state=True, reverse=True)
# 193 is what a sum of log decays must reach: in no chunk, in four, in two, in one, in one.
GAMMA = jnp.array([-0.02, -3.0, -6.5, -1e4, -jnp.inf], jnp.float32)


def with_gamma(case: Case) -> Case:
    class WithGamma(Case):
        def arrays(self, seed=0):
            found = super().arrays(seed)
            return {**found, "g_gamma": jnp.broadcast_to(GAMMA, found["g_gamma"].shape)}

    return WithGamma(**vars(case))


@pytest.mark.parametrize("case", [DENSE, PACKED], ids=["dense", "packed"])
def test_nothing_is_lost(case):
    case = with_gamma(case)
    route = route_of(plan_of(case, min_segment=SEGMENT, segment=SEGMENT))
    (o, S), grads = run_along(case, route)
    (want_o, want_S), want = value_and_grads(
        case.arrays(), case.weights(), case.shape[4] ** -0.5, case.reverse, case.cu_seqlens
    )
    assert max(relative_rms(o, want_o), relative_rms(S, want_S)) < LINEAR_TOLERANCES["float32"][0]
    errors = {name: relative_rms(grads[name], want[name]) for name in ("query", "key", "value", "initial_state")}
    assert max(errors.values()) < LINEAR_TOLERANCES["float32"][1], errors
    finite = np.isfinite(np.asarray(GAMMA))  # the gradient of -inf is 0 times inf
    assert relative_rms(grads["g_gamma"][:, finite], np.asarray(want["g_gamma"])[:, finite]) < LINEAR_TOLERANCES["float32"][1]


@pytest.mark.parametrize("gate", ["g", "g_gamma"])
def test_a_state_in_one_program(gate):
    """128 channels, packed, on Hopper: 8 warps where other ends have 4; values and gradients are those of the recurrence."""
    case = Case(
        (gate,), "mild", (1, 200, 1, 1, 128, 128), cu_seqlens=(0, 150, 150, 200), state=True, dtype="bfloat16", block_q=64
    )
    seen: list[Launch] = []
    with on_device(Device("gpu", "NVIDIA H200", 90)):
        route = route_of(plan_of(case, min_segment=1, segment=1))
        with instead_of_launching(seen.append):
            jax.eval_shape(lambda arrays: solve_along(route, arrays, jnp.array(case.cu_seqlens)), case.arrays())
        jax.clear_caches()
        (o, S), grads = jax.block_until_ready(run_along(case, route))
    assert [launch.options["num_warps"] for launch in seen if launch.name == "state_scan"] == [8]
    (want_o, want_S), want = value_and_grads(case.arrays(), case.weights(), 128**-0.5, False, case.cu_seqlens)
    errors = {"output": relative_rms(o, want_o), "final": relative_rms(S, want_S)}
    errors |= {name: relative_rms(grads[name], want[name]) for name in grads}
    assert max(errors.values()) < LINEAR_TOLERANCES["bfloat16"][1], errors


def test_what_is_skipped_could_leave_nothing():
    """The largest numbers there are, in all chunks that may be skipped and no other: to the bit the same as zeros. NaN in them
    is not seen, so they are skipped."""
    case = with_gamma(DENSE)
    route = route_of(plan_of(case, min_segment=SEGMENT, segment=SEGMENT))
    arrays = {name: x for name, x in case.arrays().items() if name != "initial_state"}
    ones = {**arrays, "key": jnp.ones_like(arrays["key"])}
    found = []
    for value in (0.0, 3e38, jnp.nan):
        values = ones["value"]
        for head, kept in ((1, 6), (2, 4), (3, 3), (4, 3)):
            values = values.at[:, : 16 * (SEGMENT - kept), head].set(value)
        o, _ = solve_along(route, {**ones, "value": values}, None)
        found.append(np.asarray(o[:, 16 * SEGMENT :, 1:]))
    assert np.isfinite(found[0]).all()
    np.testing.assert_array_equal(found[0], found[1])
    np.testing.assert_array_equal(found[0], found[2])
    slow = {**ones, "value": ones["value"].at[:, 0, 0].set(jnp.nan)}
    assert np.isnan(np.asarray(solve_along(route, slow, None)[0][:, 16 * SEGMENT :, 0])).all()


@triton.jit
def firsts(gamma, count, out, C: tl.constexpr):
    """Programs: heads. out [heads]: the first of `count` chunks that counts."""
    head = tl.program_id(0)
    tl.store(out + head, _first_that_counts(constant_decay(gamma, 0, head, 1), count, C))


def test_no_segment_is_so_long_that_a_weak_gate_loses_chunks():
    """Of the longest ones: 2^31 tokens in chunks of 16."""
    gamma, count, C = [0.0, -0.0, 0.1, jnp.inf, jnp.nan, -1e-9, -1e-6, -1e-3, -0.1], 2**27, 16
    out = {"out": jax.ShapeDtypeStruct((len(gamma),), np.int32)}
    arguments = {"gamma": jnp.array(gamma, jnp.float32), "count": count}
    found = triton_call(arguments=arguments, out_shape=out, kernel=firsts, grid=(len(gamma),), C=C, num_warps=1)["out"]
    for step, first in zip(gamma, found.tolist(), strict=True):
        full = count - first - 1  # after the last chunk that is skipped, without the one where the sequence may end
        assert first == 0 or -step * C * full > 193 * (1 - 1e-6), (step, first)
        assert first > 0 or not -step * C * count > 200, (step, first)
