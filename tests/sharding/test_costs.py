"""A split sequence costs what was planned: operations of each device, bytes that do not depend on the length, and no digits."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from ejkernel.modules import gated_delta_rule
from ejkernel.testing.operations import counted
from tests.sharding.costs import ERRORS, SENT, WORK
from tests.triton.processes import outside

SIXTEEN = {"XLA_FLAGS": "--xla_force_host_platform_device_count=16 --xla_backend_optimization_level=0"}


@pytest.fixture(scope="module")
def found(once):
    return once("costs", lambda: json.loads(outside("-m", "tests.sharding.costs", environment=SIXTEEN)))


@pytest.mark.parametrize("gates", WORK)
@pytest.mark.long
def test_work_of_a_device(found, gates):
    """At least an eighth of the whole, or the count is wrong."""
    assert 1 < found["work"][gates] <= WORK[gates]


@pytest.mark.parametrize("name", SENT)
@pytest.mark.long
def test_only_states_travel(found, name):
    program, told = SENT[name], found["sent"][name]
    assert told["bytes"] == [told["formula"]] * 2, "bytes are the formula's, at both lengths"
    steps = (program.devices - 1).bit_length() + 1
    kind, times = ("all-gather", 1) if program.exchange == "gather" else ("collective-permute", steps)
    assert told["collectives"] == [{kind: 2 * times} if program.devices > 1 else {}] * 2


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.long
def test_errors_are_those_of_the_whole_call(found, name):
    assert all(0 < times <= 1.2 for times in found["errors"][name]), found["errors"][name]


@pytest.mark.long
def test_errors_with_constant_decays(found):
    assert 0 < found["constant"] <= 1.2


def test_operations_of_loops_are_counted_as_often_as_they_run():
    step = lambda x: jnp.tanh(x @ x)
    loop = lambda x: jax.lax.fori_loop(0, 7, lambda _, x: step(x), x)
    one, seven = (counted(jax.jit(f).lower(jnp.ones((8, 8))).compile().as_text()) for f in (step, loop))
    assert one == 2 * 8**3 + 8**2
    assert 7 * one <= seven < 7 * one + 20  # and the loop's own counter
    unknown = (
        jax.jit(lambda x, n: jax.lax.fori_loop(0, n, lambda _, x: step(x), x)).lower(jnp.ones((8, 8)), 3).compile().as_text()
    )
    with pytest.raises(ValueError, match="a loop of unknown length"):
        counted(unknown)
    assert 5 * one <= counted(unknown, 5) < 5 * one + 20


def beside(jaxpr: Any, name: str) -> Iterator[set[str]]:
    """For each operation of that name, what neither it waits for nor waits for it: names, with all that is called."""
    for equation in jaxpr.eqns:
        for inner in jaxprs_in_params(equation.params):
            yield from beside(inner, name)
    made_by = {id(out): place for place, equation in enumerate(jaxpr.eqns) for out in equation.outvars}
    needs: list[set[int]] = []
    for equation in jaxpr.eqns:
        direct = {made_by[id(x)] for x in equation.invars if id(x) in made_by}
        needs.append(direct.union(*(needs[place] for place in direct)))
    for place, equation in enumerate(jaxpr.eqns):
        if equation.primitive.name == name:
            free = [n for n in range(len(needs)) if n != place and n not in needs[place] and place not in needs[n]]
            yield set().union(*(called(jaxpr.eqns[n]) for n in free))


def called(equation: Any) -> set[str]:
    inner = (called(each) for jaxpr in jaxprs_in_params(equation.params) for each in jaxpr.eqns)
    return {equation.primitive.name}.union(*inner)


def test_adjoints_of_the_delta_rule_travel_while_states_are_computed_again():
    mesh = AbstractMesh((2,), ("time",), axis_types=(AxisType.Auto,))
    local = lambda x: gated_delta_rule(x, x, x, x[..., 0], sequence_axis="time")
    run = jax.shard_map(local, mesh=mesh, in_specs=P(None, "time"), out_specs=P(None, "time"))
    traced = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(jnp.sin(run(x)))))(jnp.ones((1, 64, 2, 8)))
    forward, backward = beside(traced.jaxpr, "all_gather")
    assert "scan" not in forward, "the summary is the whole local work"
    assert "scan" in backward
