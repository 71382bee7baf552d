"""Several chunks in one turn of the xla platform's loop: the same results, and never much empty work."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._linear import LinearConfig
from ejkernel.kernels._linear.operations import recurrent as recurrent_problem
from ejkernel.kernels._xla import recurrent
from ejkernel.kernels._xla.linear import _solve
from ejkernel.kernels._xla.linear._heuristics import chunks_together
from ejkernel.kernels._xla.linear._products import pass_on
from ejkernel.testing.compare import assert_close
from ejkernel.testing.linear_cases import LinearCase

GATES = [(), ("g",), ("g_gamma",), ("gk",), ("gk", "gv")]
PLACES = [{"time": 75}, {"time": 75, "reverse": True}, {"time": 90, "lengths": (50, 0, 3, 37)}]


@pytest.mark.parametrize("place", PLACES, ids=["dense", "reversed", "packed"])
@pytest.mark.parametrize("gates", GATES, ids=str)
def test_chunks_taken_together_give_the_reference_result(monkeypatch, gates, place):
    case = LinearCase("groups", gates=gates, **place)
    monkeypatch.setattr(_solve, "chunks_together", lambda problem, rows: 3)  # three by three, the last turn not full
    assert_close(case.evaluate(functools.partial(recurrent, cfg=LinearConfig("chunked", 8))), case.expected(), case.tolerance)


def problem(tokens: int, batch: int = 1, heads: int = 1, sequences: int = 0, gates: tuple[str, ...] = ()):
    array = jnp.zeros((batch, tokens, heads, 4))
    packed = {"cu_seqlens": jnp.linspace(0, tokens, sequences + 1).astype(jnp.int32)} if sequences else {}
    return recurrent_problem(array, array, array, **dict.fromkeys(gates, array), **packed)


@pytest.mark.parametrize("rows", [8, 32, 64])
def test_a_dense_call_computes_less_than_one_chunk_too_many_per_turn(rows):
    for tokens in (1, 9, 64, 65, 300, 1025, 4096):
        count = chunks_together(problem(tokens), rows)
        turns = -(-tokens // (rows * count))
        assert turns * count - -(-tokens // rows) < turns


def test_packed_turns_are_short_beside_the_sequences():
    for sequences in (1, 4, 16, 64, 1000):
        count = chunks_together(problem(4096, sequences=sequences), 32)
        assert count == 1 or count * 32 <= 4096 / sequences / 4


def test_many_heads_and_gates_per_channel_take_fewer_chunks():
    assert chunks_together(problem(2048, batch=2, heads=4), 32) == 8
    assert chunks_together(problem(2048, batch=2, heads=4, gates=("gk",)), 32) == 4
    assert chunks_together(problem(2048, batch=8, heads=16), 32) == 1


@pytest.mark.parametrize("backwards", [False, True])
def test_pass_on_against_a_loop(backwards):
    normal = lambda i, *shape: np.asarray(jax.random.normal(jax.random.key(i), shape))
    state, added, row, column = normal(0, 2, 3, 4), normal(1, 2, 5, 3, 4), normal(2, 2, 5, 3, 1), normal(3, 2, 5, 1, 4)
    entering, after = pass_on(jnp.asarray(state), jnp.asarray(added), [jnp.asarray(row), None, jnp.asarray(column)], backwards)
    for m in range(5)[:: -1 if backwards else 1]:
        np.testing.assert_allclose(entering[:, m], state, rtol=1e-5, atol=1e-6)
        state = state * row[:, m] * column[:, m] + added[:, m]
    np.testing.assert_allclose(after, state, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("batch", "heads", "channels", "gates", "schedule"),
    [
        (1, 2, 64, (), "recurrent"),  # few states stay in the cache
        (2, 4, 64, (), "chunked" if jax.__version_info__ >= (0, 11) else "recurrent"),
        (3, 4, 64, (), "chunked"),
        (1, 1, 32, (), "chunked"),  # products of narrow rows are cheap
        (2, 4, 64, ("gk",), "recurrent"),  # a tree of products is not
        (1, 1, 128, ("gk",), "chunked"),
        (1, 1, 128, (), "chunked"),
    ],
)
def test_the_schedule_on_a_cpu(batch, heads, channels, gates, schedule):
    array = jnp.zeros((batch, 100, heads, channels))
    assert (
        recurrent.implementation.heuristic(recurrent_problem(array, array, array, **dict.fromkeys(gates, array))).schedule
        == schedule
    )
