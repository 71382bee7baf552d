"""The table of gates agrees with everything that takes gates: a gate that is missing anywhere is noticed here."""

from __future__ import annotations

import dataclasses
import inspect

import jax
import jax.numpy as jnp
import pytest

from ejkernel.kernels._linear import LinearProblem
from ejkernel.kernels._linear.gates import ARGUMENTS, CONSTANT, GATES, PER_TOKEN
from ejkernel.kernels._linear.operations import RECURRENT
from ejkernel.modules import recurrent_attention
from ejkernel.parallel.linear import LinearShard
from ejkernel.testing.linear_cases import CASES
from ejkernel.testing.linear_reference import linear_reference
from ejkernel.testing.shapes import NAMES, Shape

B, T, H, K, V = 2, 6, 3, 4, 5


def problem(name: str, shape: tuple[int, ...]) -> LinearProblem:
    arrays = {"query": (B, T, H, K), "key": (B, T, H, K), "value": (B, T, H, V), GATES[name].argument: shape}
    return jax.eval_shape(lambda: RECURRENT.problem(**{name: jnp.zeros(size) for name, size in arrays.items()}))


@pytest.mark.parametrize(
    "function", [recurrent_attention, RECURRENT.problem, linear_reference], ids=["call", "problem", "reference"]
)
def test_every_gate_is_an_argument(function):
    assert inspect.signature(function).parameters.keys() >= set(ARGUMENTS)


def test_every_gate_is_a_field_of_the_problem_with_its_axes():
    assert {field.name for field in dataclasses.fields(LinearProblem)} >= set(ARGUMENTS)
    roles = problem("g", (B, T, H)).splits()[0]
    assert {name for name in ARGUMENTS if "time" not in roles[name]} == set(CONSTANT)
    assert {*PER_TOKEN, *CONSTANT} == set(ARGUMENTS)


@pytest.mark.parametrize("name", GATES)
def test_a_gate_has_the_shape_that_the_table_says_and_no_other(name):
    gate = GATES[name]
    right = gate.shape(() if gate.constant else (B, T), H, K, V)
    made = problem(name, right)
    assert sum(getattr(made, argument) is not None for argument in ARGUMENTS) == 1
    if name in NAMES:
        assert Shape(B, T, H, K, V, gates=(name,)).sizes()[gate.argument] == right
    else:  # a form of an argument that shapes name otherwise
        assert GATES["gk"].channels == gate.channels
    with pytest.raises(ValueError, match=f"{gate.argument} must be"):
        problem(name, (*right[:-1], right[-1] + 7))


@pytest.mark.parametrize("name", GATES)
def test_every_gate_decays_what_passes_from_shard_to_shard(name):
    """Along a sequence axis: a gate that is not read there would let states pass undecayed."""
    gate = GATES[name]
    rows = () if gate.constant else (B, T)
    arrays = {"query": (B, T, H, K), "key": (B, T, H, K), "value": (B, T, H, V), gate.argument: gate.shape(rows, H, K, V)}
    made = RECURRENT.problem(**{name: jnp.zeros(shape) for name, shape in arrays.items()})
    of_rows, of_columns = LinearShard(made, lambda problem: (problem.value, problem.value))._logs(made.differentiable, None)
    assert ((of_rows is None), (of_columns is None)) == ((gate.channels == "value"), (gate.channels != "value"))


@pytest.mark.parametrize("name", GATES)
def test_every_gate_is_among_the_shared_cases_alone_and_with_others(name):
    given = {frozenset(case.gates) for case in CASES}
    assert frozenset({name}) in given
    assert any(name in gates and len(gates) > 1 for gates in given)
