"""Every route on bfloat16 calls with 64 channels and more, weakly gated chunks and resets, with all tiles it is tuned over."""

import dataclasses
from typing import Any

import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")

from ejkernel._device import device_of
from ejkernel.kernels._linear.operations import recurrent as recurrent_problem
from ejkernel.kernels._triton.linear._plan import Plan
from ejkernel.kernels._triton.linear._platform import TritonLinear
from ejkernel.kernels._triton.linear.routes import ROUTES, route_of
from ejkernel.testing.compare import LINEAR_TOLERANCES, relative_rms
from tests.triton.along import run_along
from tests.triton.linear_cases import BY_ROUTE
from tests.triton.linear_reference import value_and_grads

pytestmark = pytest.mark.skipif(device_of(()).backend != "cpu", reason="interpreted on the host")
DEFAULT_ALONE = {"key and value gate"}  # its kernels' other tiles are those of "outputs in the scan", which is tried with all
COMPILER_ONLY = ("num_warps", "num_stages")  # what the interpreter does not see


def interpreted_alike(cfg):
    return dataclasses.replace(cfg, **dict.fromkeys(COMPILER_ONLY))


def tried(case):
    """The case's candidates, one of each kind that the interpreter can tell apart, by their routes."""
    problem = recurrent_problem(**case.arrays())
    found: dict[Any, Any] = {}
    for cfg in TritonLinear().candidates(problem):
        plan = Plan.of(problem, cfg)
        kinds = route_of(plan).name, interpreted_alike(cfg)
        found.setdefault(kinds, route_of(plan))
    return list(found.values())


@pytest.mark.long
@pytest.mark.parametrize("name", BY_ROUTE)
def test_every_candidate_is_right(name):
    case = BY_ROUTE[name]
    want_values, want_grads = value_and_grads(case.arrays(), case.weights(), case.shape[4] ** -0.5)
    first, *_ = routes = tried(case)
    assert name in (first.name, first.differentiated(constant_decay="g_gamma" in case.gates).name)
    for route in routes[: 1 if name in DEFAULT_ALONE else None]:
        values, grads = run_along(case, route)
        errors = [relative_rms(x, y) for x, y in zip(values, want_values, strict=True)]
        errors += [relative_rms(grads[n], want_grads[n]) for n in grads]
        assert max(errors) < LINEAR_TOLERANCES["bfloat16"][0], (route.name, route.plan)


def test_there_is_a_case_of_every_route():
    routes = [tried(case)[0] for case in BY_ROUTE.values()]
    assert {type(route) for first in routes for route in (first, first.differentiated(constant_decay=False))} == set(ROUTES)
    assert all(case.dtype == "bfloat16" and min(case.shape[4:]) >= 64 for case in BY_ROUTE.values())
