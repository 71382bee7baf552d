"""A NaN or inf in an input spoils its own sequence and head, from the start of its chunk on, and nothing else."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import kernel_registry
from ejkernel.kernels._linear import LinearConfig
from ejkernel.kernels._pallas._chips import interpreted
from ejkernel.kernels._registry import Backend
from ejkernel.testing.linear_cases import LinearCase

ROWS = 16
TIME, TOKEN = 21, 18  # in the second chunk, not at its start
LENGTHS = (17, 3, 0, 6)  # packed sequences; the second and the last share a chunk of rows
DENSE = ((0, 0, jnp.nan), (1, 1, jnp.inf))  # what is spoiled at a time: (row, key head, value), no two in one row or head
PACKED = ((1, 0, jnp.nan), (3, 1, jnp.inf))
PER_SEQUENCE = ("g_gamma", "initial_state")
small = functools.partial(LinearCase, time=TIME, key_channels=16, value_channels=16, initial_state=True)
CASES = [
    small("plain"),
    small("g", gates=("g", "g_gamma"), heads=4),
    small("gk", gates=("gk",)),
    small("all-gates", gates=("g", "g_gamma", "gk", "gv")),
    small("packed-g", gates=("g", "g_gamma"), lengths=LENGTHS),
    small("packed-gk", gates=("gk",), lengths=LENGTHS),
]


def implementations() -> list:
    entries = kernel_registry.list_implementations("recurrent")
    return [pytest.param(e, id=str(e.platform), marks=[pytest.mark.gpu] * (e.backend is Backend.GPU)) for e in entries]


def compiled(case: LinearCase, entry, schedule: str):
    """`arrays -> (output, state, gradients)` of a linear loss, whose cotangents are finite whatever the arrays hold."""
    _, options = case.arguments()
    cfg = LinearConfig(schedule, ROWS)
    call = functools.partial(entry.function, cfg=cfg, **options)
    weights = tuple(jnp.asarray(w, jnp.float32) for w in case.weights())
    there = interpreted if entry.backend is Backend.TPU else contextlib.nullcontext
    with there():
        if (reason := entry.function.implementation.refuses(case.problem, cfg)) is not None:
            pytest.skip(f"refused: {reason}")

    def run(arrays):
        with there():
            outputs, pull = jax.vjp(lambda arrays: call(**arrays), arrays)
            return {"output": outputs[0], "state": outputs[1], **{f"d{name}": x for name, x in pull(weights)[0].items()}}

    return jax.jit(run)


def part(case: LinearCase, name: str, x: Any, sequence: int, head: int, tokens: slice = slice(None)) -> tuple[Any, ...]:
    """Where an array belongs to a sequence and a key head, at these tokens of the sequence if it has tokens."""
    per_sequence = name.removeprefix("d") in (*PER_SEQUENCE, "state")
    group = x.shape[1 if per_sequence else 2] // case.kv_heads
    heads = slice(head * group, (head + 1) * group)
    if per_sequence:
        return sequence, heads
    ends = np.cumsum([0, *case.lengths]) if case.lengths else None
    row, first, end = (sequence, 0, case.time) if ends is None else (0, ends[sequence], ends[sequence + 1])
    start, stop, _ = tokens.indices(end - first)
    return row, slice(first + start, first + stop), heads


def spoil(case: LinearCase, name: str, x: jax.Array) -> jax.Array:
    """One token of every spoiled sequence and head."""
    token = 1 if case.lengths else TOKEN
    for sequence, head, value in PACKED if case.lengths else DENSE:
        *before, heads = part(case, name, x, sequence, head, slice(token, token + 1))
        x = x.at[*before, heads.start].set(value)
    return x


@pytest.mark.parametrize("schedule", ["chunked", "recurrent"])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("entry", implementations())
def test_only_its_own_sequence_is_spoiled(entry, case, schedule):
    arrays, _ = case.arguments()
    run = compiled(case, entry, schedule)
    clean = {name: np.asarray(x) for name, x in run(arrays).items()}
    assert all(np.isfinite(x).all() for x in clean.values())
    for name, x in arrays.items():
        got = {key: np.asarray(found) for key, found in run({**arrays, name: spoil(case, name, x)}).items()}
        spoiled = {key: np.zeros(found.shape, bool) for key, found in got.items()}
        for sequence, head, value in PACKED if case.lengths else DENSE:
            for key, found in got.items():
                spoiled[key][part(case, key, found, sequence, head)] = True
            output = got["output"]
            if name in ("query", "key", "value"):
                assert not np.isfinite(output[part(case, "output", output, sequence, head)]).all(), (
                    f"{value} in {name} is not seen"
                )
            if name not in PER_SEQUENCE and not case.lengths:
                before = part(case, "output", output, sequence, head, slice(TOKEN // ROWS * ROWS))
                np.testing.assert_array_equal(output[before], clean["output"][before], err_msg=name)
        for key, found in got.items():
            others = ~spoiled[key]
            np.testing.assert_array_equal(found[others], clean[key][others], err_msg=f"{key} with a spoiled {name}")


@pytest.mark.parametrize("entry", implementations())
def test_a_spoiled_query_head_leaves_the_others_of_its_group(entry):
    case = CASES[1]
    arrays, _ = case.arguments()
    run = compiled(case, entry, "chunked")
    clean, got = run(arrays), run({**arrays, "query": arrays["query"].at[0, TOKEN, 0].set(jnp.nan)})
    for name in ("output", "dquery"):
        np.testing.assert_array_equal(got[name][:, :, 1:], clean[name][:, :, 1:])
    np.testing.assert_array_equal(got["state"], clean["state"])
