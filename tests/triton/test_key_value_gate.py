"""Gates on keys and values, bfloat16: a result has the error of its own rounding and hardly any other."""

import dataclasses

import jax.numpy as jnp
import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")

from ejkernel._device import device_of
from ejkernel.kernels._triton.linear import _solve
from ejkernel.kernels._triton.linear.routes import route_of
from ejkernel.kernels._triton.linear.routes.key_value_gate import KeyValueGate
from ejkernel.testing.compare import relative_rms
from tests.triton.along import plan_of, run_along
from tests.triton.linear_cases import Case
from tests.triton.linear_reference import value_and_grads

pytestmark = pytest.mark.skipif(device_of(()).backend != "cpu", reason="the interpreter's own tests")
ROUNDING = 1.66e-3  # relative RMS error of one rounding to bfloat16
MIXED = "resets now and then"
KIND = {"state": True, "dtype": "bfloat16", "block_q": 64}


@pytest.mark.parametrize(
    ("strength", "way"),
    [("mild", "outputs"), ("strong", "outputs"), (MIXED, "outputs"), (MIXED, "states alone"), (MIXED, "split")],
)
def test_a_result_is_rounded_once(strength, way):
    case = Case(("gk", "gv"), strength, (1, 100, 1, 1, 32, 40), **KIND)
    route = route_of(plan_of(case, min_segment=1) if way == "split" else plan_of(case))
    assert isinstance(route, KeyValueGate)
    assert route.outputs_in_scan
    errors_are_of_rounding(case, dataclasses.replace(route, outputs_in_scan=way != "states alone"))


def test_the_fewest_key_channels():
    """Two parts of 16 would have nothing in the second."""
    case = Case(("gk", "gv"), "mild", (1, 70, 2, 2, 16, 64), **KIND)
    route = route_of(plan_of(case))
    assert isinstance(route, KeyValueGate)
    assert not route.outputs_in_scan
    errors_are_of_rounding(case, route)


def errors_are_of_rounding(case, route):
    got, grads = run_along(case, route)
    want, want_grads = value_and_grads(case.arrays(), case.weights(), case.shape[4] ** -0.5)
    results = {"output": (got[0], want[0]), "final": (got[1], want[1])} | {n: (grads[n], want_grads[n]) for n in grads}
    errors = {n: relative_rms(x, y) for n, (x, y) in results.items()}
    most = {n: 1.2 * ROUNDING if x.dtype == jnp.bfloat16 else 0.2 * ROUNDING for n, (x, _) in results.items()}
    assert all(errors[n] < most[n] for n in results), errors


def test_what_is_weakly_gated_is_decided_once():
    """A chunk at the limit must not be weakly gated to the forward pass, which then keeps no scores for it, and not to the
    backward pass."""
    case = Case(("gk", "gv"), "mild", (1, 70, 1, 1, 24, 40), **KIND)
    arrays, (wo, _) = case.arrays(), case.weights()
    route = route_of(plan_of(case))
    output, _, saved = _solve._forward(route, True, arrays, None)
    other = dataclasses.replace(route, plan=plan_of(case, weak_limit=-1.0))
    grads = _solve._backward(other, arrays, None, saved, jnp.asarray(wo, output.dtype), None)
    want = value_and_grads(arrays, (wo, jnp.zeros((1, 1, 24, 40))), 24**-0.5)[1]
    assert max(relative_rms(grads[n], want[n]) for n in grads) < 1.2 * ROUNDING
