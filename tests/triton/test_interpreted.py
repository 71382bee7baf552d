"""The triton kernels, interpreted on the host, against the float64 recurrence: values and every gradient."""

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")

from ejkernel._device import device_of
from ejkernel.kernels._linear import LinearConfig
from ejkernel.kernels._triton import recurrent
from ejkernel.testing.compare import LINEAR_TOLERANCES, relative_rms
from ejkernel.testing.linear_cases import CASES
from tests.triton.linear_cases import INTERPRETED, Case
from tests.triton.linear_reference import value_and_grads

pytestmark = pytest.mark.skipif(
    device_of(()).backend != "cpu", reason="where there is a GPU, test_gpu.py runs the kernels compiled"
)
TOLERANCE = {dtype: values for dtype, (values, _) in LINEAR_TOLERANCES.items()}  # of values, held for gradients too


def run(case: Case, **options):
    """((output, final state), gradients) of the case's loss by the triton platform."""
    arrays, (wo, ws) = case.arrays(), case.weights()
    cu = None if case.cu_seqlens is None else jnp.array(case.cu_seqlens, jnp.int32)
    cfg = LinearConfig(schedule=case.schedule, block_q=case.block_q, **options)

    def loss(arrays):
        o, S = recurrent(**arrays, cu_seqlens=cu, reverse=case.reverse, cfg=cfg)
        return sum(jnp.sum(x.astype(jnp.float32) * w.astype(jnp.float32)) for x, w in ((o, wo), (S, ws))), (o, S)

    grads, values = jax.grad(loss, has_aux=True)(arrays)
    return values, grads


@pytest.mark.parametrize("case", INTERPRETED, ids=str)
def test_matches_float64(case):
    values, grads = run(case)
    want_values, want_grads = value_and_grads(
        case.arrays(), case.weights(), case.shape[4] ** -0.5, case.reverse, case.cu_seqlens
    )
    errors = {"output": relative_rms(values[0], want_values[0]), "final state": relative_rms(values[1], want_values[1])}
    errors |= {f"d{name}": relative_rms(grads[name], want_grads[name]) for name in grads}
    assert max(errors.values()) < TOLERANCE[case.dtype], errors
    assert values[0].dtype == case.dtype
    assert values[1].dtype == jnp.float32
    assert all(grads[n].dtype == x.dtype for n, x in case.arrays().items())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_gradient_of_a_reset_is_zero(dtype):
    case = Case(("g",), dtype=dtype, shape=(1, 40, 2, 1, 16, 16), state=True)
    arrays = case.arrays()
    resets = [(3, -jnp.inf), (17, -1e4), (18, -jnp.inf)]
    for t, value in resets:
        arrays["g"] = arrays["g"].at[:, t].set(value)
    found = jax.grad(lambda g: jnp.sum(recurrent(**(arrays | {"g": g}))[0].astype(jnp.float32)))(arrays["g"])
    at_resets = found[0, jnp.array([t for t, _ in resets])]
    assert jnp.all(at_resets == 0)
    assert jnp.sum(found != 0) > 60


def test_gradient_of_one_strong_gate_among_mild_ones():
    """By itself, not only against the size of the whole: 1e-8 beside 1."""
    case = Case(("g",), shape=(1, 16, 1, 1, 16, 16))
    arrays = case.arrays() | {"g": jnp.full((1, 16, 1), -0.05).at[0, 5].set(-20.0)}
    weights = case.weights()
    grads = jax.grad(lambda g: jnp.sum(recurrent(**(arrays | {"g": g}))[0] * weights[0]))(arrays["g"])
    want = value_and_grads(arrays, (weights[0], 0 * weights[1]), 0.25)[1]["g"]
    assert abs(grads[0, 5, 0] / want[0, 5, 0] - 1) < 1e-4


def small(gates=("gk",)):
    return Case(gates, shape=(2, 20, 2, 1, 16, 16), state=True)


def test_packed_lengths_may_be_traced():
    case = Case(("g",), shape=(1, 40, 2, 1, 16, 16), cu_seqlens=(0, 13, 13, 40))
    run = jax.jit(lambda arrays, cu: recurrent(**arrays, cu_seqlens=cu, cfg=LinearConfig(block_q=16)))
    want = run(case.arrays(), jnp.array(case.cu_seqlens))
    other = run(case.arrays(), jnp.array((0, 20, 21, 40)))
    values, _ = value_and_grads(case.arrays(), case.weights(), 0.25, cu_seqlens=case.cu_seqlens)
    assert relative_rms(want[0], values[0]) < 2e-6
    assert relative_rms(other[0], values[0]) > 1e-3  # other lengths, same compiled function, another answer


def test_constant_decay_needs_no_states_unless_its_gradient_is_asked_for():
    case = small(("g_gamma",))
    arrays = case.arrays()
    gamma = arrays.pop("g_gamma")
    wo, _ = case.weights()
    loss = lambda arrays, gamma: jnp.sum(recurrent(**arrays, g_gamma=gamma, cfg=LinearConfig(block_q=16))[0] * wo)
    by_passes, with_gamma = jax.grad(loss)(arrays, gamma), jax.grad(loss, argnums=(0, 1))(arrays, gamma)[0]
    for name in arrays:
        assert relative_rms(by_passes[name], with_gamma[name]) < 2e-6, name


@pytest.mark.parametrize("gates", [("gk",), ("gk", "gv")], ids="+".join)
def test_traced_scale_in_bfloat16(gates):
    case = Case(gates, shape=(1, 70, 1, 1, 16, 16), dtype="bfloat16", block_q=64)
    arrays, (wo, _) = case.arrays(), case.weights()
    loss = lambda arrays, scale: jnp.sum(recurrent(**arrays, softmax_scale=scale)[0].astype(jnp.float32) * wo)
    found = jax.jit(jax.grad(loss))(arrays, jnp.float32(0.25))
    want = jax.grad(loss)(arrays, 0.25)
    assert all(relative_rms(found[name], want[name]) < 6e-3 for name in arrays)


SETTINGS = {
    "dtypes": lambda: jax.numpy_dtype_promotion("strict"),
    "ranks": lambda: jax.numpy_rank_promotion("raise"),
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("case", [case for case in CASES if case.lengths or "128-channels" in case.name], ids=str)
def test_nothing_is_promoted(case, setting):
    arrays, options = case.arguments()

    def both(arrays):
        out, pull = jax.vjp(lambda arrays: recurrent(**arrays, **options), arrays)
        return out, pull(out)

    with SETTINGS[setting]():
        jax.eval_shape(both, arrays)


def test_refusals_say_why():
    x = jnp.ones((1, 4, 1, 600))
    with pytest.raises(ValueError, match="up to 512; got 600 and 600"):
        recurrent(x, x, x)


def test_no_tokens():
    x = jnp.ones((2, 0, 1, 8))
    o, S = recurrent(x, x, x, initial_state=jnp.ones((2, 1, 8, 8)))
    assert o.shape == (2, 0, 1, 8)
    assert (S == 1).all()
