"""The kernels for TPUs over the cases that all platforms share, interpreted: values and every gradient."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._linear import LinearConfig
from ejkernel.kernels._pallas import lightning_attn, recurrent
from ejkernel.kernels._pallas._chips import interpreted
from ejkernel.testing.compare import assert_close
from ejkernel.testing.linear_cases import CASES, LIGHTNING_CASES, LinearCase

in_chunks = functools.partial(recurrent, cfg=LinearConfig(block_q=32))  # one object: cases of the same shapes compile once
SHORT = ("g-infinite", "scalar-time-1", "packed-rank3")
marked = [pytest.param(case, marks=[] if case.name in SHORT else [pytest.mark.slow], id=str(case)) for case in CASES]


@pytest.mark.parametrize("case", marked)
def test_matches_float64(case):
    arrays, _ = case.arguments()
    with interpreted():
        if (reason := recurrent.supports(case.problem)) is not None:
            assert {str(x.dtype) for x in arrays.values()} & {"float16"}
            pytest.skip(f"refused: {reason}")
        assert_close(case.evaluate(in_chunks), case.expected(), case.tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in LIGHTNING_CASES if case.dtype != "float16"][:6], ids=str)
def test_lightning_matches_float64(case):
    with interpreted():
        assert_close(case.evaluate(lightning_attn), case.expected(), case.tolerance)


DECODED = [
    LinearCase(f"{'-'.join(gates)}-{dtype}{'-reverse' * reverse}", gates=gates, gate_kind=kind, dtype=dtype, time=time, batch=3,
               heads=4, kv_heads=2, reverse=reverse, initial_state=True)
    for gates, kind, dtype, time, reverse in (
        (("g", "g_gamma"), "resets", "float32", 1, False),
        (("gk", "gv", "g"), "everything", "bfloat16", 3, True),
        ((), "mild", "float32", 16, False),
    )
]  # fmt: skip


@pytest.mark.parametrize("case", [DECODED[0], *(pytest.param(case, marks=pytest.mark.slow) for case in DECODED[1:])], ids=str)
def test_a_decode_step_matches_float64(case):
    with interpreted():
        assert recurrent.implementation.heuristic(case.problem).schedule == "recurrent"
        assert_close(case.evaluate(recurrent), case.expected(), case.tolerance)


class Even(LinearCase):
    """Gates that add up to `seed` hundredths a token, half of it to all of it: as strong as weakly gated chunks may be."""

    def arguments(self):
        arrays, options = super().arguments()
        rng = np.random.default_rng(1)
        for name in set(arrays) & {"g", "gk", "gv"}:
            gate = -self.seed / 100 * rng.uniform(0.5, 1, arrays[name].shape)
            arrays[name] = jnp.asarray(gate, arrays[name].dtype)
        return arrays, options


weak = functools.partial(Even, dtype="bfloat16", batch=1, time=130, heads=1, kv_heads=1, initial_state=True)
WEAK = [
    # (case, rows): just below and just above what one chunk, or 32 rows of it, may have
    (weak("g-below", gates=("g",), seed=48), 128),
    (weak("g-above", gates=("g",), seed=80), 128),
    (weak("gk-below", gates=("gk",), seed=11), 64),
    (weak("gk-above", gates=("gk",), seed=60), 64),
    (weak("gk-gv-below", gates=("gk", "gv"), seed=11), 64),
    (weak("gv-above", gates=("gv",), seed=60), 64),
]


@pytest.mark.long
@pytest.mark.parametrize(("case", "rows"), [pytest.param(case, rows, id=str(case)) for case, rows in WEAK])
def test_weakly_gated_chunks_match_float64(case, rows):
    with interpreted():
        assert_close(
            case.evaluate(functools.partial(recurrent, cfg=LinearConfig(block_q=rows))), case.expected(), case.tolerance
        )


blocks = functools.partial(LinearCase, batch=1, time=600, heads=1, kv_heads=1, initial_state=True, gates=("g",))
BLOCKS = [
    # (case, rows): chunks of several blocks of 128 rows, with one between two others
    (blocks("resets", gate_kind="resets"), 512),
    (blocks("infinite-bfloat16", gate_kind="infinite", dtype="bfloat16"), 512),
    (blocks("everything-bfloat16", gate_kind="everything", dtype="bfloat16", reverse=True), 256),
    (blocks("mild", gate_kind="mild"), 512),
]


@pytest.mark.parametrize(("case", "rows"), [pytest.param(case, rows, id=str(case)) for case, rows in BLOCKS])
def test_decays_between_blocks_of_a_chunk_match_float64(case, rows):
    with interpreted():
        assert_close(
            case.evaluate(functools.partial(recurrent, cfg=LinearConfig(block_q=rows))), case.expected(), case.tolerance
        )
