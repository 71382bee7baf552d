"""Cases of this folder computed along a route that a test has made, instead of the one that the call would take."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._linear import LinearConfig
from ejkernel.kernels._linear.operations import recurrent as recurrent_problem
from ejkernel.kernels._triton.linear._plan import Plan
from ejkernel.kernels._triton.linear._solve import solve_along
from ejkernel.kernels._triton.linear.routes import Route
from tests.triton.linear_cases import Case


def plan_of(case: Case, **changes: Any) -> Plan:
    """The plan of a case, with some of its static data changed."""
    cu_seqlens = None if case.cu_seqlens is None else jnp.array(case.cu_seqlens, jnp.int32)
    problem = recurrent_problem(**case.arrays(), cu_seqlens=cu_seqlens, reverse=case.reverse)
    return dataclasses.replace(Plan.of(problem, LinearConfig(schedule=case.schedule, block_q=case.block_q)), **changes)


def run_along(case: Case, route: Route) -> Any:
    """((output, final state), gradients) of the case's loss."""
    wo, ws = case.weights()
    cu_seqlens = None if case.cu_seqlens is None else jnp.array(case.cu_seqlens, jnp.int32)

    def loss(arrays: dict[str, Any]) -> Any:
        o, S = solve_along(route, arrays, cu_seqlens)
        return sum(jnp.sum(x.astype(jnp.float32) * w.astype(jnp.float32)) for x, w in ((o, wo), (S, ws))), (o, S)

    grads, values = jax.grad(loss, has_aux=True)(case.arrays())
    return values, grads
