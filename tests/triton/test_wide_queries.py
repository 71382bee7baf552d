"""One gate per head with 129 to 256 key channels, forward alone: q is read as it is, and its decay put on its products with
the state. With the gradient, which goes back along q times its decays, those are made."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")

from ejkernel._device import device_of
from ejkernel.callib import Launch, instead_of_launching
from ejkernel.kernels._triton.linear._call import Call
from ejkernel.kernels._triton.linear._solve import solve_along
from ejkernel.kernels._triton.linear.routes import route_of
from ejkernel.testing.compare import LINEAR_TOLERANCES, reference_settings, relative_rms
from ejkernel.testing.linear_reference import linear_reference
from tests.triton.along import plan_of
from tests.triton.linear_cases import Case

pytestmark = pytest.mark.skipif(device_of(()).backend != "cpu", reason="interpreted on the host")
BF16 = {"dtype": "bfloat16", "block_q": 64}
SHAPE = (1, 100, 1, 1, 136, 80)
CASES = [
    *(Case(("g",), strength, shape=SHAPE, state=True, **BF16) for strength in ("mild", "strong", "near -20", "resets", "-inf")),
    Case(("g", "g_gamma"), "resets", shape=(1, 70, 2, 1, 136, 80), reverse=True, **BF16),
    Case(("g_gamma",), shape=(1, 70, 1, 1, 256, 130), state=True, reverse=True, **BF16),
    Case((), shape=(1, 128, 1, 1, 256, 72), **BF16),
    Case(("g",), "resets", shape=(1, 130, 1, 1, 144, 72), cu_seqlens=(0, 5, 5, 75, 130), state=True, **BF16),
    Case(("g",), "-inf", shape=(1, 100, 1, 1, 144, 72), cu_seqlens=(0, 70, 70, 100), reverse=True, **BF16),
]  # fmt: skip


def route(case, **changes):
    return route_of(plan_of(case, **changes))


def along(taken, arrays, cu_seqlens=None):
    return solve_along(taken, arrays, None if cu_seqlens is None else jnp.asarray(cu_seqlens, jnp.int32))


def exact(case):
    with reference_settings():
        arrays = {name: jnp.asarray(np.asarray(x, np.float64)) for name, x in case.arrays().items()}
        packed = None if case.cu_seqlens is None else np.asarray(case.cu_seqlens)
        scale = case.shape[4] ** -0.5
        found = linear_reference(**arrays, softmax_scale=scale, reverse=case.reverse, cu_seqlens=packed)
        return [np.asarray(x) for x in found]


@pytest.mark.parametrize(
    ("case", "changes"), [*((case, {}) for case in CASES), (CASES[3], {"segment": 1}), (CASES[5], {"segment": 1})], ids=str
)
def test_matches_float64(case, changes):
    """In one segment, or of one chunk each; packed ones are always cut."""
    found = along(route(case, **changes), case.arrays(), case.cu_seqlens)
    for got, want in zip(found, exact(case), strict=True):
        assert relative_rms(got, want) < LINEAR_TOLERANCES["bfloat16"][0]


@pytest.mark.parametrize("strength", ["mild", "resets"])
def test_a_prefix_has_the_bits_of_the_whole(strength):
    case = Case(("g",), strength, shape=(1, 150, 1, 1, 136, 80), **BF16)
    arrays = case.arrays()
    taken = route(case, segment=1)
    whole, _ = along(taken, arrays)
    part, _ = along(taken, {name: x[:, :100] for name, x in arrays.items()})
    np.testing.assert_array_equal(np.asarray(whole[:, :100], np.float32), np.asarray(part, np.float32))


def prepared(case, *, keep, **changes):
    """Of what `head_gate_rows` leaves: (how many of q and k times their decays, whether q's decays alone)."""
    seen: list[Launch] = []
    taken = route(case, **changes)
    with instead_of_launching(seen.append):
        jax.eval_shape(lambda arrays: taken.forward(Call.of(taken.plan, arrays, None), keep), case.arrays())
    (shapes,) = ([x.shape for x in launch.outputs] for launch in seen if launch.name == "head_gate_rows")
    return shapes.count((2, 1, 64, 256)), (2, 1, 64) in shapes


def test_decayed_queries_are_left_out_where_nothing_else_reads_them():
    case = CASES[0]
    assert prepared(case, keep=False) == (1, True)
    assert prepared(case, keep=True) == (2, False)  # the gradient goes back along them
    assert prepared(case, keep=False, shared=100 << 10) == (2, False)  # `scan_rows` takes them
