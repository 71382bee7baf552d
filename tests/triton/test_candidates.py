"""Configurations of the triton platform: every field does something or is refused, and what the tuner is offered compiles."""

import dataclasses
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")

from ejkernel.kernels._delta import DeltaProblem
from ejkernel.kernels._linear import LinearConfig
from ejkernel.kernels._linear.operations import recurrent as recurrent_problem
from ejkernel.kernels._triton import recurrent
from ejkernel.kernels._triton._recurrence import MOST
from ejkernel.kernels._triton.gated_delta_rule._platform import TritonDeltaRule
from ejkernel.kernels._triton.linear._platform import TritonLinear
from ejkernel.testing.triton_calls import arguments
from tests.triton.processes import outside

TRITON = TritonLinear()
GATES = [(), ("g",), ("g_gamma",), ("gk",), ("gv",), ("gk", "gv")]
FIELDS = {"block_q": 32, "block_k": 16, "block_d": 16, "num_warps": 8, "num_stages": 5}
ISSUE: dict[tuple[int, int], list[tuple[str, ...]]] = {  # K, V, gates of the shapes that are tuned
    (128, 128): [(), ("g",), ("g_gamma",), ("gk",), ("gk", "gv")],
    (64, 64): [(), ("g",), ("g_gamma",), ("gk",)],
    (256, 512): [("g",), ("gk",)],
}


def problem(gates, K=128, V=128, dtype="bfloat16", T=1000):
    at_T = lambda x: jax.ShapeDtypeStruct(tuple(T if size == 1000 else size for size in x.shape), x.dtype)
    return jax.eval_shape(lambda arrays: recurrent_problem(**arrays), jax.tree.map(at_T, arguments(gates, K, V, dtype)))


def delta_step(channels):
    of = lambda *shape: jax.ShapeDtypeStruct((128, 1, 16, *shape), jnp.bfloat16)
    return DeltaProblem(query=of(channels), key=of(channels), value=of(channels), beta=of(), g=of(channels))


def launches(monkeypatch, gates, cfg, K=128, V=128):
    """What every kernel of a call and of its gradient is launched with; nothing is compiled or run."""
    seen: list[tuple[str, str]] = []

    def note(*args, kernel, out_shape, **options):
        options = {name: x for name, x in options.items() if name != "arguments"}
        seen.append((kernel.fn.__name__, str(sorted(options.items(), key=str))))
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out_shape)

    for name, module in list(sys.modules.items()):
        if name.startswith("ejkernel.kernels._triton.") and hasattr(module, "triton_call"):
            monkeypatch.setattr(module, "triton_call", note)
    jax.clear_caches()
    loss = lambda arrays: sum(x.astype(jnp.float32).sum() for x in recurrent(**arrays, cfg=cfg))
    jax.make_jaxpr(jax.grad(loss))(arguments(gates, K, V, "bfloat16"))
    jax.clear_caches()
    return seen


CALLS = [(gates, schedule, (128, 128)) for gates in GATES for schedule in ("chunked", "recurrent")]


@pytest.mark.parametrize(("gates", "schedule", "size"), [*CALLS, (("g",), "chunked", (256, 512))], ids=str)
def test_every_field_has_an_effect_or_is_refused(gates, schedule, size, monkeypatch):
    plain = LinearConfig(schedule=schedule)
    usual = launches(monkeypatch, gates, plain, *size)
    assert usual
    for field, value in FIELDS.items():
        cfg = dataclasses.replace(plain, **{field: value})
        if TRITON.refuses(problem(gates, *size), cfg) is None:
            assert launches(monkeypatch, gates, cfg, *size) != usual, field
        else:
            with pytest.raises(ValueError, match=field):
                launches(monkeypatch, gates, cfg, *size)


def test_refusals():
    arrays = {n: jnp.zeros(x.shape, x.dtype) for n, x in arguments((), 64, 64, "bfloat16").items()}
    with pytest.raises(ValueError, match="block_q must be one of 16, 32, 64, 128 on triton; got 8"):
        recurrent(**arrays, cfg=LinearConfig(block_q=8))
    with pytest.raises(ValueError, match="block_k must be None for a call without gates"):
        recurrent(**arrays, cfg=LinearConfig(block_k=32))


@pytest.mark.parametrize(("size", "gates"), [(size, g) for size, kinds in ISSUE.items() for g in kinds], ids=str)
def test_candidates_are_few_distinct_and_legal(size, gates):
    call = problem(gates, *size)
    found = TRITON.candidates(call)
    assert 4 <= len(found) <= MOST
    assert len(set(found)) == len(found)
    assert all(TRITON.refuses(call, cfg) is None and cfg.platform == "triton" for cfg in found)


STEPS: list[Any] = [
    (TRITON, problem(gates, *size, T=1)) for gates, size in ((("gk",), (128, 128)), (("g",), (64, 64)), ((), (256, 512)))
]
STEPS += [(TritonDeltaRule(), delta_step(channels)) for channels in (64, 128, 256)]


@pytest.mark.parametrize(("platform", "step"), STEPS, ids=lambda x: getattr(x, "shape", ""))
def test_a_step_is_raced_with_tiles_that_differ(platform, step):
    """A thread loads 64 bytes of the state or more, and holds no more than does not spill."""
    tiles = [platform.taken(step, cfg).tiles for cfg in platform.candidates(step)]
    assert 4 <= len(tiles) <= MOST
    assert len(set(tiles)) == len(tiles)
    assert all(16 <= keys * values // (32 * warps) <= 64 for keys, values, warps in tiles)
    assert {values for _, values, _ in tiles} >= {16, 32, 64}
    assert len({warps for _, _, warps in tiles}) >= 3


def test_the_usual_tiles_of_a_step_are_the_fastest_measured():
    """Of 128 channels: key channels, value channels, warps of a program. The delta rule: 0.072 ms, for 0.075 with the other."""
    for platform, step, usual in ((TritonDeltaRule(), delta_step(128), (128, 32, 2)), (*STEPS[0], (128, 64, 4))):
        first, *others = (platform.taken(step, cfg).tiles for cfg in platform.candidates(step))
        assert first == usual
        assert usual not in others


@pytest.mark.long
def test_candidates_compile():
    """Those of the gate with the largest tiles; of all calls: python -m benchmarks.triton_resources --candidates"""
    text = outside("-m", "benchmarks.triton_resources", "--candidates", "--json", "--capability", "90", "--calls", "gk")
    entries = [json.loads(line) for line in text.splitlines()]
    assert len({e["config"] for e in entries}) == len(TRITON.candidates(problem(("gk",))))
    assert not [e for e in entries if e["lowered"]]  # a named number of stages that does not fit is an error
