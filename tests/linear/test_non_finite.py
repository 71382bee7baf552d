"""A NaN or inf in an input spoils its own sequence and head, from the start of its chunk on, and nothing else."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel import kernel_registry
from ejkernel.kernels._linear import LinearConfig
from ejkernel.kernels._registry import Backend
from ejkernel.testing.linear_cases import LinearCase

ROWS = 16
TOKEN = 21  # of the sequence, or of the row that packs it: in the second chunk, and in the second of the packed sequences
LENGTHS = (18, 5, 0, 12)
PER_SEQUENCE = ("g_gamma", "initial_state")
small = functools.partial(LinearCase, time=37, heads=4, kv_heads=2, key_channels=16, value_channels=16, initial_state=True)
CASES = [
    small("plain"),
    small("g", gates=("g", "g_gamma")),
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
    call = functools.partial(entry.function, cfg=LinearConfig(schedule, ROWS), **options)
    weights = tuple(jnp.asarray(w, jnp.float32) for w in case.weights())

    def run(arrays):
        outputs, pull = jax.vjp(lambda arrays: call(**arrays), arrays)
        return {"output": outputs[0], "state": outputs[1], **{f"d{name}": x for name, x in pull(weights)[0].items()}}

    return jax.jit(run)


def others(case: LinearCase, name: str, x: np.ndarray) -> np.ndarray:
    """True where an array belongs to other sequences or heads than those that the spoiled token and key head 0 have."""
    per_sequence = name.removeprefix("d") in (*PER_SEQUENCE, "state")
    heads = x.shape[1 if per_sequence else 2]
    spoiled_heads = heads // case.kv_heads
    spoiled = np.zeros(x.shape, bool)
    if per_sequence:
        spoiled[1 if case.lengths else 0, :spoiled_heads] = True
    elif case.lengths:
        spoiled[0, LENGTHS[0] : LENGTHS[0] + LENGTHS[1], :spoiled_heads] = True
    else:
        spoiled[0, :, :spoiled_heads] = True
    return ~spoiled


@pytest.mark.parametrize("schedule", ["chunked", "recurrent"])
@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("entry", implementations())
def test_only_its_own_sequence_is_spoiled(entry, case, schedule):
    arrays, _ = case.arguments()
    run = compiled(case, entry, schedule)
    clean = {name: np.asarray(x) for name, x in run(arrays).items()}
    assert all(np.isfinite(x).all() for x in clean.values())
    sequence = 1 if case.lengths else 0
    for name, x in arrays.items():
        at = (sequence, 0) if name in PER_SEQUENCE else (0, TOKEN, 0)
        for value in (jnp.nan, jnp.inf):
            got = {key: np.asarray(found) for key, found in run({**arrays, name: x.at[at].set(value)}).items()}
            assert not np.isfinite(got["output"]).all(), f"{value} in {name} is not seen"
            for key, found in got.items():
                mine = others(case, key, found)
                np.testing.assert_array_equal(found[mine], clean[key][mine], err_msg=f"{key} with {value} in {name}")
            if name not in PER_SEQUENCE:
                start = LENGTHS[0] if case.lengths else TOKEN // ROWS * ROWS
                np.testing.assert_array_equal(got["output"][:, :start], clean["output"][:, :start], err_msg=name)


@pytest.mark.parametrize("entry", implementations())
def test_a_spoiled_query_head_leaves_the_others_of_its_group(entry):
    case = CASES[1]
    arrays, _ = case.arguments()
    run = compiled(case, entry, "chunked")
    clean, got = run(arrays), run({**arrays, "query": arrays["query"].at[0, TOKEN, 0].set(jnp.nan)})
    for name in ("output", "dquery"):
        np.testing.assert_array_equal(got[name][:, :, 1:], clean[name][:, :, 1:])
    np.testing.assert_array_equal(got["state"], clean["state"])
