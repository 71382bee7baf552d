"""The correction of a chunk in registers: beside `delta_correction` on the same scores, in whole calls, and compiled."""

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")
pytest.importorskip("triton.experimental.gluon", reason="this Triton has no Gluon")

from ejkernel._device import Device, device_of, on_device
from ejkernel.kernels._delta import GatedDeltaRuleConfig
from ejkernel.kernels._triton import gated_delta_rule
from ejkernel.kernels._triton.gated_delta_rule._plan import delta_plan
from ejkernel.kernels._triton.gated_delta_rule.routes import launches as delta_launches
from ejkernel.kernels._triton.gated_delta_rule.routes import route_of
from ejkernel.kernels._triton.linear._call import Call
from ejkernel.kernels._triton.linear._launches import arrays_of, launches
from ejkernel.testing.compare import assert_close, relative_rms
from ejkernel.testing.delta_cases import DeltaCase
from tests.triton.processes import outside
from tests.triton.test_delta import problem

interpreted = pytest.mark.skipif(device_of(()).backend != "cpu", reason="where there is a GPU, test_delta.py runs it compiled")
H200 = Device("gpu", "NVIDIA H200", 90)
KERNEL = "delta_correction_in_registers"
CHUNKED = GatedDeltaRuleConfig("chunked", 64)
SCORED = functools.partial(DeltaCase, batch=1, heads=2, gate="channel", dtype="bfloat16")
SCORES = [
    *(
        SCORED(f"{keys}-{beta.replace(' ', '-')}", time=100, key_kind=keys, beta_kind=beta)
        for keys, beta in (
            ("unit", "usual"), ("correlated", "near two"), ("identical", "near two"), ("raw", "to two"), ("unit", "zero"),
        )
    ),
    SCORED("reverse", time=70, reverse=True, key_kind="raw", beta_kind="some zero"),
    SCORED("packed", lengths=(65, 0, 1, 64), key_kind="correlated"),
]  # fmt: skip


def split_scores(keys: np.ndarray, token: int, sign: int, rows: int) -> np.ndarray:
    """[2, heads, 64, 64] in bfloat16: the scores of a chunk's keys [tokens, heads, K], high and low part, and nonsense that
    nobody may read above the blocks on the diagonal."""
    chunk = np.zeros((64, *keys.shape[1:]))
    chunk[:rows] = keys[token : token + sign * rows : sign] if sign > 0 else keys[token - rows + 1 : token + 1][::-1]
    scores = np.einsum("thk,shk->hts", chunk, chunk)
    high = scores.astype(jnp.bfloat16)
    low = (scores - high.astype(np.float64)).astype(jnp.bfloat16)
    block = np.arange(64) // 16
    return np.where(block[:, None] >= block, np.stack([high, low]), jnp.bfloat16(np.nan))


@interpreted
@pytest.mark.parametrize("case", SCORES, ids=str)
@pytest.mark.parametrize("parts", [1, 2])
def test_as_the_portable_correction(case, parts, monkeypatch):
    """On the same scores: the same arithmetic, so next to the same numbers where the rule amplifies every rounding, too."""
    rule = case.problem
    plan = delta_plan(rule, CHUNKED)
    call = Call.of(plan, dict(rule.differentiable), rule.cu_seqlens)
    chunks = call.chunks
    where = chunks_of(case)
    assert len(where) <= chunks.count
    flat = np.asarray(rule.differentiable["key"], np.float64)[0]
    scores = np.full((2, chunks.count, 2, 64, 64), np.nan, jnp.bfloat16)
    for s, (token, rows) in enumerate(where):
        scores[:, s] = split_scores(flat, token, plan.sign, rows)
    high, low = (jnp.asarray(x) for x in scores)
    correction = lambda: delta_launches.correction_of(call, high, low if parts == 2 else None)
    in_registers = correction()
    monkeypatch.setattr(delta_launches, "HAS_GLUON", False)
    portable = correction()
    lower = np.tri(4, dtype=bool).repeat(16, 0).repeat(16, 1)
    for s in range(len(where)):
        np.testing.assert_array_equal(in_registers.betas[s], portable.betas[s])
        for h in range(2):
            found, want = (np.where(lower, np.asarray(x.Z[s, h], np.float32), 0.0) for x in (in_registers, portable))
            assert np.isfinite(found).all()
            assert relative_rms(found, want) < 5e-4 or not want.any()
    assert in_registers.key_scores is None


def chunks_of(case: DeltaCase) -> list[tuple[int, int]]:
    """(token of row 0, rows) of every chunk of a call of one row, sequence by sequence."""
    found, begin = [], 0
    for length in case.lengths or (case.time,):
        for at in range(0, length, 64):
            token = begin + length - 1 - at if case.reverse else begin + at
            found.append((token, min(64, length - at)))
        begin += length
    return found


WHOLE = [
    DeltaCase(
        name, batch=1, heads=2, key_heads=1, gate="channel", gate_kind=gates, key_kind=keys, beta_kind=beta, dtype="bfloat16",
        initial_state=True, key_channels=K, value_channels=64, **cut,
    )
    for name, gates, keys, beta, K, cut in (
        ("correlated", "mild", "correlated", "near two", 64, {"time": 70}),
        ("identical", "zero", "identical", "to two", 64, {"time": 64, "reverse": True}),
        ("raw", "mild", "raw", "usual", 128, {"time": 65}),
        ("everything", "everything", "unit", "to two", 64, {"lengths": (65, 0, 1, 64)}),
        ("resets", "resets", "unit", "some zero", 128, {"lengths": (66, 3), "reverse": True}),
        ("infinite", "infinite", "unit", "usual", 64, {"time": 129}),
    )
]  # fmt: skip
LONG = ("everything", "resets")


@interpreted
@pytest.mark.parametrize("case", [pytest.param(x, marks=pytest.mark.long) if x.name in LONG else x for x in WHOLE], ids=str)
def test_whole_calls_match_float64(case, launched, monkeypatch):
    run = functools.partial(gated_delta_rule, cfg=CHUNKED)
    with on_device(H200):
        found = jax.block_until_ready(case.evaluate(run))
    assert KERNEL in launched
    want, (values, gradients) = case.expected(), case.tolerance
    if case.amplifies:  # bfloat16's own rounding, too
        monkeypatch.setattr(delta_launches, "HAS_GLUON", False)
        launched.clear()
        jax.clear_caches()  # where what is traced is kept by its plan
        with on_device(H200):
            portable = jax.block_until_ready(case.evaluate(run))
        jax.clear_caches()
        assert KERNEL not in launched
        of_portable = 1.02 * max(relative_rms(portable[n], want[n]) for n in want)
        values, gradients = max(values, of_portable), max(gradients, of_portable)
    assert_close(found, want, (values, gradients))


def kernels_of(*call, cfg=CHUNKED, **of_problem) -> list[str]:
    """What a call launches, forward and backward."""
    rule = problem(*call, **of_problem)
    found = launches(route_of(delta_plan(rule, cfg)), arrays_of(rule), rule.cu_seqlens)
    return [launch.name for launch in (*found.forward, *found.backward)]


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("capability", [80, 89, 90, 100, 120])
def test_gates_per_key_channel_on_every_gpu(capability, packed, monkeypatch):
    """Where this Triton has no Gluon, by the portable kernel."""
    found = {K: kernels_of("channel", K, 64, 2000, packed=packed, capability=capability) for K in (64, 100, 128, 256)}
    monkeypatch.setattr(delta_launches, "HAS_GLUON", False)
    for K, kernels in found.items():
        portable = kernels_of("channel", K, 64, 2000, packed=packed, capability=capability)
        assert "delta_correction" in portable
        assert kernels == [KERNEL if name == "delta_correction" else name for name in portable]


def test_all_other_calls_by_the_portable_kernel():
    others: tuple[tuple[str | None, dict[str, Any]], ...] = (
        ("head", {}), (None, {}), ("channel", {"dtype": "float32"}), ("channel", {"dtype": "float16"}),
        ("channel", {"cfg": GatedDeltaRuleConfig("chunked", 32)}),
    )  # fmt: skip
    for gate, options in others:
        found = kernels_of(gate, 64, 64, 2000, **options)
        assert "delta_correction" in found
        assert KERNEL not in found


@pytest.mark.long
def test_compiled():
    """For every GPU it spills next to nothing, and between its products no thread asks another."""
    compiled = json.loads(outside("-m", "tests.triton.correction_in_registers"))
    assert {found["capability"] for found in compiled} == {80, 89, 90, 120}
    for found in compiled:
        assert found["spills"] <= 8, found
        # Twelve programs of a warp to a multiprocessor of an H200, which shared memory has room for.
        assert found["registers"] <= 168, found
        assert found["shared"] <= 18 << 10, found
        assert found["products"] == 208, found
        assert found["shuffles"] == 0, found
        assert found["barriers"] == 2, found
