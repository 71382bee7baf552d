"""The scan that holds a state transposed and makes no matrix of decays: as exact as the other, whatever the gate."""

import jax.numpy as jnp
import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")

from ejkernel._device import device_of
from ejkernel.kernels._triton.linear._launches import launches
from ejkernel.kernels._triton.linear.routes import route_of
from ejkernel.testing.compare import relative_rms
from tests.triton.along import plan_of, run_along
from tests.triton.linear_cases import Case
from tests.triton.linear_reference import value_and_grads

pytestmark = pytest.mark.skipif(device_of(()).backend != "cpu", reason="the interpreter's own tests")
_BF16 = {"dtype": "bfloat16", "block_q": 64, "state": True}
CASES = [
    Case(("g",), shape=(1, 70, 2, 1, 16, 16), reverse=True, **_BF16),
    Case(("g",), "near -20", shape=(1, 70, 1, 1, 16, 16), **_BF16),
    Case(("g",), "resets now and then", shape=(1, 80, 2, 2, 24, 16), cu_seqlens=(0, 5, 5, 80), **_BF16),
    Case(("g",), "positive", shape=(1, 70, 1, 1, 16, 24), **_BF16),
    Case(("g_gamma",), shape=(1, 70, 2, 2, 16, 16), **_BF16),
    Case((), shape=(1, 70, 2, 1, 16, 16), **_BF16),
]


@pytest.mark.parametrize("case", [CASES[0], *(pytest.param(case, marks=pytest.mark.long) for case in CASES[1:])], ids=str)
def test_as_exact_as_the_other_scan(case):
    want_values, want_grads = value_and_grads(
        case.arrays(), case.weights(), case.shape[4] ** -0.5, case.reverse, case.cu_seqlens
    )
    errors = []
    for by_columns in (False, True):
        route = route_of(plan_of(case, state_by_columns=by_columns))
        seen = launches(route, case.arrays(), None if case.cu_seqlens is None else jnp.array(case.cu_seqlens, jnp.int32))
        names = {launch.name for launch in (*seen.forward, *seen.backward)}
        assert ("head_gate_column_scan" in names) == by_columns
        values, grads = run_along(case, route)
        found = {f"d{name}": relative_rms(x, want_grads[name]) for name, x in grads.items()}
        found |= {n: relative_rms(x, y) for n, x, y in zip(("output", "state"), values, want_values, strict=True)}
        errors.append(found)
    usual, found = errors
    assert max(found.values()) < 6e-3, found
    worse = {name: (found[name], usual[name]) for name in usual if found[name] > 1.05 * usual[name] + 1e-6}
    assert not worse
