"""On Hopper: which segments with a gate per key channel are scanned in one kernel, and how far what is not finite reaches."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")

from ejkernel._device import device_of
from ejkernel.kernels._triton.linear._call import Call
from ejkernel.kernels._triton.linear.routes import route_of
from ejkernel.testing.compare import relative_rms
from tests.triton.along import plan_of, run_along
from tests.triton.linear_cases import Case

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(device_of(()).capability != 90, reason="needs an NVIDIA GPU of compute capability 9.0"),
]
KEY = {"dtype": "bfloat16", "gate_dtype": "bfloat16", "block_q": 64, "state": True}


def weakly_gated(gk: np.ndarray) -> np.ndarray:
    """[chunks, H]: which chunks' log decays stay within 40 of the middle of their rows, and of the middle of their sum."""
    B, T, H, K = gk.shape
    logs = gk.astype(np.float64).reshape(B * T // 64, 2, 32, H, K)
    whole = logs.sum(2)  # [chunks, 2, H, K]
    c = np.cumsum(logs, 2)
    c[:, 0] -= whole[:, :1]
    lean = (whole[:, 0] - whole[:, 1])[:, None, None] / 2
    return (np.maximum(np.abs(c), np.abs(c + lean)) <= 40).all((1, 2, 4))


@pytest.mark.parametrize("strength", ["mild", "resets in some segments", "at sequences' beginnings", "near -20"])
def test_segments_that_are_weakly_gated_throughout(strength):
    case = Case(("gk",), strength, (1, 8192, 2, 2, 128, 64), **KEY)
    plan, arrays = plan_of(case), case.arrays()
    call = Call.of(plan, arrays, None)
    route = sys.modules[type(route_of(plan)).__module__]
    begin, segments = arrays["initial_state"], call.segments(route.TILES)
    begun = route._scan_weak_segments(call, *call.query_key_value, begin, plan.output, segments, keep=False)
    of_segment = weakly_gated(np.asarray(arrays["gk"])).reshape(begun.segments.count, -1, 2).all(1)
    np.testing.assert_array_equal(np.asarray(begun.done) != 0, np.repeat(of_segment, begun.segments.length, 0))
    assert begun.segments.count > 1
    if strength == "resets in some segments":
        assert set(of_segment.ravel()) == {False, True}


@pytest.mark.parametrize("name", ["query", "key", "value", "gk"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_stays_in_its_head_and_after_its_chunk(name, value):
    class Spoiled(Case):
        def arrays(self, seed=0):
            arrays = super().arrays(seed)
            return arrays | {name: arrays[name].at[1, 200, 1].set(value)}

    shape = (2, 320, 2, 2, 128, 128)
    spoiled, clean = Spoiled(("gk",), shape=shape, **KEY), Case(("gk",), shape=shape, **KEY)
    (output, _), grads = run_along(spoiled, route_of(plan_of(spoiled)))
    (want, _), of_clean = run_along(clean, route_of(plan_of(clean)))
    jax.tree.map(np.testing.assert_array_equal, output[0], want[0])
    jax.tree.map(np.testing.assert_array_equal, output[1, :, 0], want[1, :, 0])
    assert relative_rms(output[1, :192, 1], want[1, :192, 1]) < 6e-3
    for gradient in ("query", "key", "value", "gk"):
        for other in ((0, slice(None)), (1, slice(None), 0)):
            assert bool(jnp.isfinite(grads[gradient][other].astype(jnp.float32)).all())
            np.testing.assert_array_equal(grads[gradient][other], of_clean[gradient][other])
