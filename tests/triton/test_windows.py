"""A forward pass without a gradient stores no more states than the plan allows: long calls go in windows of time."""

import functools

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")

from ejkernel._device import Device, device_of, on_device
from ejkernel.callib import instead_of_launching
from ejkernel.kernels._linear import LinearConfig
from ejkernel.kernels._linear.operations import recurrent as recurrent_problem
from ejkernel.kernels._triton.linear._call import Call
from ejkernel.kernels._triton.linear._launches import arrays_of
from ejkernel.kernels._triton.linear._plan import STATE_BYTES, Plan
from ejkernel.kernels._triton.linear._solve import solve_along
from ejkernel.kernels._triton.linear._windows import forward_pass
from ejkernel.kernels._triton.linear.routes import route_of
from ejkernel.testing.compare import relative_rms
from tests.triton.along import plan_of
from tests.triton.linear_cases import Case


def stored(gates, K, tokens, keep=False, dtype="bfloat16"):
    """(launches of a forward pass on an H200, the most bytes of states that one of them writes)."""
    dims = {"query": (1, tokens, 16, K), "key": (1, tokens, 16, K), "value": (1, tokens, 16, K)}
    dims |= {gate: (1, tokens, 16, K)[: 3 if gate == "g" else 4] for gate in gates}
    with on_device(Device("gpu", "NVIDIA H200", 90)):
        problem = jax.eval_shape(lambda: recurrent_problem(**{name: jnp.zeros(x, dtype) for name, x in dims.items()}))
    route = route_of(Plan.of(problem, LinearConfig("chunked", 64)))
    seen: list = []
    run = lambda arrays: forward_pass(route, Call.of(route.plan, arrays, None), keep)
    with instead_of_launching(seen.append):
        jax.eval_shape(run, arrays_of(problem))
    outputs = [dict(zip(launch.names[-len(launch.outputs) :], launch.outputs, strict=True)) for launch in seen]
    found = [x["states"] for x in outputs if x.get("states") is not None]
    return len(seen), max((x.size * x.dtype.itemsize for x in found), default=0)


@pytest.mark.parametrize(
    ("gates", "K", "dtype"), [(("gk", "gv"), 128, "bfloat16"), (("g",), 512, "bfloat16"), (("gk",), 128, "float32")], ids=str
)
def test_states_of_a_long_call_stay_within_the_limit(gates, K, dtype):
    find = functools.partial(stored, gates, K, dtype=dtype)
    assert 0 < find(2048)[1] <= STATE_BYTES
    launches, most = find(1 << 19)
    assert STATE_BYTES / 2 < most <= STATE_BYTES
    assert launches > find(2048)[0]
    assert find(1 << 19, keep=True)[1] > STATE_BYTES


@pytest.mark.parametrize("gates", [(), ("g",), ("gk",)], ids=str)
def test_outputs_made_in_the_scan_need_no_states(gates):
    assert stored(gates, 128, 1 << 19)[1] == 0


@pytest.mark.skipif(device_of(()).backend != "cpu", reason="the interpreter's own test")
@pytest.mark.parametrize("reverse", [False, True])
def test_windows_give_what_the_whole_gives(reverse):
    case = Case(("gv", "g_gamma"), shape=(1, 70, 1, 1, 16, 16), state=True, reverse=reverse)
    whole, windows = (
        solve_along(route_of(plan_of(case, min_segment=1, state_bytes=most)), case.arrays(), None) for most in (STATE_BYTES, 1)
    )
    for got, want in zip(windows, whole, strict=True):
        assert got.shape == want.shape
        assert relative_rms(got, want) < 1e-6
