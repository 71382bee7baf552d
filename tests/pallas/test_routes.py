"""Which route a call takes on TPUs: decided once, the same for forward, backward and candidates, and shown by `report()`."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import pytest

from ejkernel import ops
from ejkernel.kernels._delta import DeltaProblem
from ejkernel.kernels._linear import LinearConfig, LinearProblem
from ejkernel.kernels._linear.problem import DECODED_TOKENS
from ejkernel.kernels._pallas._chips import CHIPS, interpreted
from ejkernel.kernels._pallas.gated_delta_rule._platform import PallasDeltaRule
from ejkernel.kernels._pallas.gated_delta_rule.routes import ROUTES as DELTA_ROUTES
from ejkernel.kernels._pallas.linear._platform import PallasLinear
from ejkernel.kernels._pallas.linear._route import Given, Stepwise
from ejkernel.kernels._pallas.linear.routes import ROUTES as LINEAR_ROUTES
from ejkernel.modules import recurrent_attention
from ejkernel.testing.tpu_routes import calls
from ejkernel.testing.tpu_schedules import kernels_of

LINEAR, DELTA = PallasLinear(), PallasDeltaRule()
GATES = [gates for n in range(5) for gates in itertools.combinations(("g", "g_gamma", "gk", "gv"), n)]
DELTA_GATES = [None, "head", "channel"]
SIZES = list(itertools.product([(16, 16), (24, 40), (64, 64), (128, 128), (256, 192)], [1, DECODED_TOKENS, 20, 2048]))
DTYPES = ["bfloat16", "float32"]


def of(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def linear_problem(gates, channels, T, dtype, packed, chip, heads=4):
    (K, V), N = channels, 3 if packed else 1
    shapes = {"g": (1, T, heads), "g_gamma": (N, heads), "gk": (1, T, heads, K), "gv": (1, T, heads, V)}
    arrays = {"query": (1, T, heads, K), "key": (1, T, heads, K), "value": (1, T, heads, V)}
    arrays = {name: of(*shape, dtype=dtype) for name, shape in (arrays | {name: shapes[name] for name in gates}).items()}
    return LinearProblem(**arrays, cu_seqlens=of(N + 1, dtype="int32") if packed else None, device=CHIPS[chip].device)


def delta_problem(gate, channels, T, dtype, packed, chip, heads=4):
    K, V = channels
    arrays = {"query": (1, T, 2, K), "key": (1, T, 2, K), "value": (1, T, heads, V), "beta": (1, T, heads)}
    arrays |= {"g": (1, T, heads) if gate == "head" else (1, T, heads, K)} if gate else {}
    arrays = {name: of(*shape, dtype=dtype) for name, shape in arrays.items()}
    return DeltaProblem(**arrays, cu_seqlens=of(4, dtype="int32") if packed else None, device=CHIPS[chip].device)


def check_one_route(platform, problem, chunked, title, packed, T):
    """Candidates, forward and backward agree; the heuristic is the first candidate, and none is refused."""
    assert platform.supports(problem) is None
    first, *others = found = platform.candidates(problem)
    assert first == platform.heuristic(problem)
    assert len(set(found)) == len(found)
    steps = T <= DECODED_TOKENS and not packed
    assert platform.route(problem, first) == (f"{title} (gradient: {chunked})" if steps else chunked)
    route = platform.taken(problem, first)
    assert route == platform.taken(problem, first)  # static data: the same call is not compiled twice
    assert hash(route) == hash(platform.taken(problem, first))
    for cfg in found:
        assert platform.refuses(problem, cfg) is None, cfg
        assert platform.route(problem, cfg) == platform.route(problem, first)
    assert all(type(platform.taken(problem, cfg)) is type(route) for cfg in others)


@pytest.mark.parametrize("gates", GATES, ids=lambda gates: "+".join(gates) or "none")
def test_every_linear_call_has_one_route(gates):
    chunked = "channel gates" if {"gk", "gv"} & set(gates) else "head gate"
    for (channels, T), dtype, packed, chip in itertools.product(SIZES, DTYPES, (False, True), ("v4", "v5e")):
        problem = linear_problem(gates, channels, T, dtype, packed, chip)
        check_one_route(LINEAR, problem, chunked, "decode step", packed, T)


@pytest.mark.parametrize("gate", DELTA_GATES)
def test_every_call_of_the_delta_rule_has_one_route(gate):
    chunked = "delta rule, key gate" if gate == "channel" else "delta rule, head gate"
    for (channels, T), dtype, packed, chip in itertools.product(SIZES, DTYPES, (False, True), ("v4", "v5e")):
        problem = delta_problem(gate, channels, T, dtype, packed, chip)
        check_one_route(DELTA, problem, chunked, "delta rule, decode step", packed, T)


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize(
    ("platform", "problem"),
    [
        *((LINEAR, lambda packed, g=g: linear_problem(g, (64, 64), 40, "bfloat16", packed, "v5e")) for g in GATES[::3]),
        *((DELTA, lambda packed, g=g: delta_problem(g, (64, 64), 40, "bfloat16", packed, "v5e")) for g in DELTA_GATES),
    ],
)
def test_the_gradient_finds_what_the_forward_pass_has_kept(platform, problem, packed):
    call = problem(packed)
    route, arrays = platform.taken(call, platform.heuristic(call)), call.differentiable

    def gradients(arrays, cu_seqlens):
        given = Given(arrays, cu_seqlens)
        output, final, saved = route.forward(given, keep=True)
        assert tuple(saved) == route.kept
        return route.backward(given, saved, output, final)

    found = jax.eval_shape(gradients, arrays, call.cu_seqlens)
    assert {n: (x.shape, x.dtype) for n, x in found.items()} == {n: (x.shape, x.dtype) for n, x in arrays.items()}


@pytest.mark.parametrize(("platform", "routes"), [(LINEAR, LINEAR_ROUTES), (DELTA, DELTA_ROUTES)])
def test_every_route_is_taken_by_some_call_of_the_page(platform, routes):
    listed = {call.route() for _, examples in calls().values() for call in examples}
    assert all(any(name.startswith(route.title) for name in listed) for route in routes)


@pytest.mark.parametrize("gate", ["g", "gk"])
def test_a_decode_step_has_the_gradient_of_its_chunked_route(gate):
    problem = linear_problem((gate,), (64, 64), 4, "bfloat16", False, "v5e")
    route = LINEAR.taken(problem, LinearConfig("recurrent"))
    assert isinstance(route, Stepwise)
    assert type(route.chunked) is type(LINEAR.taken(problem, LinearConfig("chunked", 16)))

    def gradients(arrays):
        given = Given(arrays, None)
        return route.backward(given, {}, arrays["value"], given.initial())

    names = {name for name, _, _ in kernels_of(jax.make_jaxpr(gradients)(problem.differentiable).jaxpr)}
    assert names == {"head_gate_backward" if gate == "g" else "channel_gates_backward"}


def test_the_report_shows_the_route():
    x = jnp.ones((1, 20, 2, 8), jnp.bfloat16)
    with interpreted():
        recurrent_attention(x, x, x, g=jnp.zeros((1, 20, 2)), platform="pallas")
        assert ops.report()[-1].route == "head gate"
        assert "route: head gate" in str(ops.report())
        recurrent_attention(x[:, :3], x[:, :3], x[:, :3], gk=x[:, :3], platform="pallas")
        assert ops.report()[-1].route == "decode step (gradient: channel gates)"
