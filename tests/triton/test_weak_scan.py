"""The forward pass of weakly gated sequences where no gradient is to come: as exact as the route it stands for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")
from ejkernel._device import device_of
from ejkernel.callib import instead_of_launching
from ejkernel.kernels._triton.linear._call import Call
from ejkernel.kernels._triton.linear._solve import solve_along
from ejkernel.kernels._triton.linear.routes import Route, route_of
from ejkernel.kernels._triton.linear.routes.weak import scan_weak_sequences
from ejkernel.testing.compare import relative_rms
from tests.triton.along import plan_of
from tests.triton.linear_cases import Case
from tests.triton.linear_reference import value_and_grads

pytestmark = pytest.mark.skipif(device_of(()).backend != "cpu", reason="the interpreter's own tests")
_BF16 = {"dtype": "bfloat16", "gate_dtype": "bfloat16", "block_q": 64, "state": True}
_FLOAT32 = {**_BF16, "gate_dtype": "float32"}
CASES = [  # (call, chunks of the shortest segment)
    (Case(("gk",), shape=(1, 140, 2, 1, 100, 36), **_BF16), 8),
    (Case(("gk",), "resets now and then", shape=(1, 300, 2, 2, 24, 16), cu_seqlens=(0, 5, 5, 70, 300), **_BF16), 1),
    (Case(("gk",), shape=(2, 128, 2, 2, 64, 64), gate_heads="Hkv", **_BF16), 8),
    (Case(("gk",), shape=(1, 330, 1, 1, 40, 70), reverse=True, **_BF16), 1),
    (Case(("gk",), "positive", shape=(1, 130, 1, 1, 16, 24), **_FLOAT32), 8),
    (Case(("gk",), "near -20", shape=(1, 70, 1, 1, 16, 16), **_FLOAT32), 8),
    (Case(("gk",), "-inf", shape=(2, 200, 2, 1, 32, 16), **_BF16), 1),
    (Case(("gk",), "resets now and then", shape=(1, 400, 2, 1, 70, 16), **_FLOAT32), 2),
    (Case(("gk", "g", "g_gamma"), shape=(1, 300, 2, 1, 66, 16), reverse=True, **_BF16), 2),
]


def cu_of(case: Case) -> jax.Array | None:
    return None if case.cu_seqlens is None else jnp.array(case.cu_seqlens, jnp.int32)


def launched(route: Route, case: Case) -> list[str]:
    """The kernels of a call without a gradient."""
    seen: list[str] = []
    with instead_of_launching(lambda launch: seen.append(launch.name)):
        jax.eval_shape(lambda arrays: route.forward(Call.of(route.plan, arrays, cu_of(case)), False)[:2], case.arrays())
    return seen


@pytest.mark.parametrize(
    ("case", "least"), [*CASES[:2], *(pytest.param(*x, marks=pytest.mark.long) for x in CASES[2:])], ids=str
)
def test_as_exact_as_the_route_with_gradients(case, least):
    want, _ = value_and_grads(case.arrays(), case.weights(), case.shape[4] ** -0.5, case.reverse, case.cu_seqlens)
    errors = []
    for scan_weak in (False, True):
        route = route_of(plan_of(case, scan_weak=scan_weak, min_segment=least))
        assert ("weak_scan" in launched(route, case)) == scan_weak
        got = solve_along(route, case.arrays(), cu_of(case))
        errors.append([relative_rms(x, y) for x, y in zip(got, want, strict=True)])
    usual, found = errors
    assert found[0] <= min(1.1 * usual[0], 6e-3), errors
    assert found[1] < 2e-3, errors  # of keys rounded once, here the chunk's last ones as well


def test_one_strong_chunk_leaves_its_sequence_and_head_to_the_exact_kernels():
    case = Case(("gk",), shape=(2, 200, 3, 1, 16, 16), **_BF16)
    arrays = case.arrays()
    arrays["gk"] = arrays["gk"].at[1, 130, 2, 5].set(-1e4)
    plan = plan_of(case)
    done = scan_weak_sequences(Call.of(plan, arrays, None))
    np.testing.assert_array_equal(done.strong, [[0, 0, 0], [0, 0, 1]])
    assert np.isnan(np.asarray(done.output[1, :, 2], np.float32)).all()  # not written
    assert np.isfinite(np.asarray(done.output[0], np.float32)).all()
    want, _ = value_and_grads(arrays, case.weights(), case.shape[4] ** -0.5)
    got = solve_along(route_of(plan), arrays, None)
    assert max(relative_rms(x, y) for x, y in zip(got, want, strict=True)) < 6e-3


def test_gates_at_the_limit_lose_nothing():
    case = Case(("gk",), shape=(1, 64, 1, 1, 16, 16), **_FLOAT32)  # twice as many steps up would leave float32's range
    for log in (-1.24, 1.24):
        arrays = case.arrays() | {"gk": jnp.full((1, 64, 1, 16), log)}
        want, _ = value_and_grads(arrays, case.weights(), case.shape[4] ** -0.5)
        done = scan_weak_sequences(Call.of(plan_of(case), arrays, None))
        assert not np.asarray(done.strong).any()
        assert max(relative_rms(x, y) for x, y in zip((done.output, done.final), want, strict=True)) < 6e-3


def test_calls_that_name_tiles_or_have_wide_keys_take_the_usual_way():
    case = Case(("gk",), shape=(1, 128, 1, 1, 16, 16), **_BF16)
    assert "weak_scan" in launched(route_of(plan_of(case)), case)
    assert "weak_scan" not in launched(route_of(plan_of(case, block_d=32)), case)
    wide = Case(("gk",), shape=(1, 128, 1, 1, 200, 16), **_BF16)
    assert "weak_scan" not in launched(route_of(plan_of(wide)), wide)
