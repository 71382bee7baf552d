"""Gates per key and per value channel, bfloat16: a result has the error of its own rounding and hardly any other."""

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")
import triton.language as tl

from ejkernel.kernels._linear import LinearConfig
from ejkernel.kernels._triton.recurrent import _launch_both, _mild, _plan, _solve, recurrent
from ejkernel.testing.compare import relative_rms
from tests.triton.linear_cases import Case
from tests.triton.linear_reference import value_and_grads
from tests.triton.test_interpreted import run

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="the interpreter's own tests")
ROUNDING = 1.66e-3  # relative RMS error of one rounding to bfloat16
MIXED = "resets now and then"
KIND = {"state": True, "dtype": "bfloat16", "block_q": 64}


@pytest.mark.parametrize(
    ("strength", "way"),
    [("mild", "outputs"), ("strong", "outputs"), (MIXED, "outputs"), (MIXED, "walk and side"), (MIXED, "split")],
)
def test_a_result_is_rounded_once(strength, way, monkeypatch):
    if way == "walk and side":
        monkeypatch.setattr(_launch_both, "OUTPUTS_SHARED", 1 << 30)
    if way == "split":
        monkeypatch.setattr(_plan, "MIN_SEGMENT", 1)
    _solve._forward.clear_cache()
    _solve._backward.clear_cache()
    errors_are_of_rounding(Case(("gk", "gv"), strength, (1, 100, 1, 1, 32, 40), **KIND))


def test_the_fewest_key_channels():
    """Two parts of 16 would have nothing in the second."""
    errors_are_of_rounding(Case(("gk", "gv"), "mild", (1, 70, 2, 2, 16, 64), **KIND))


def errors_are_of_rounding(case):
    got, grads = run(case)
    want, want_grads = value_and_grads(case.arrays(), case.weights(), case.shape[4] ** -0.5)
    pairs = {"output": (got[0], want[0]), "final": (got[1], want[1])} | {n: (grads[n], want_grads[n]) for n in grads}
    errors = {n: relative_rms(x, y) for n, (x, y) in pairs.items()}
    most = {n: 1.2 * ROUNDING if x.dtype == jnp.bfloat16 else 0.2 * ROUNDING for n, (x, _) in pairs.items()}
    assert all(errors[n] < most[n] for n in pairs), errors


def test_what_is_mild_is_decided_once(monkeypatch):
    """A chunk at the limit must not be mild to the forward pass, which then keeps no pairs for it, and not to the backward."""
    case = Case(("gk", "gv"), "mild", (1, 70, 1, 1, 24, 40), **KIND)
    arrays, (wo, _) = case.arrays(), case.weights()
    output, pull = jax.vjp(lambda a: recurrent(**a, cfg=LinearConfig("chunked", 64))[0], arrays)
    monkeypatch.setattr(_mild, "MILD", tl.constexpr(-1.0))
    (grads,) = pull(jnp.asarray(wo, output.dtype))
    want = value_and_grads(arrays, (wo, jnp.zeros((1, 1, 24, 40))), 24**-0.5)[1]
    assert max(relative_rms(grads[n], want[n]) for n in grads) < 1.2 * ROUNDING


@pytest.fixture(autouse=True)
def compile_again():
    yield
    _solve._forward.clear_cache()
    _solve._backward.clear_cache()
