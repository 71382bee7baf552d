"""The delta rule on the triton platform over the cases that all platforms share: interpreted here, compiled on a GPU."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")

from ejkernel._device import Device, device_of
from ejkernel.kernels._delta import DeltaProblem, GatedDeltaRuleConfig
from ejkernel.kernels._triton import gated_delta_rule
from ejkernel.kernels._triton._recurrence import MAX_STEPS, MOST
from ejkernel.kernels._triton.gated_delta_rule._plan import delta_plan
from ejkernel.kernels._triton.gated_delta_rule._platform import TritonDeltaRule
from ejkernel.kernels._triton.gated_delta_rule.routes import ROUTES, route_of
from ejkernel.kernels._triton.gated_delta_rule.routes.launches import head_gate_rows
from ejkernel.kernels._triton.linear._call import Call
from ejkernel.kernels._triton.linear._launches import arrays_of, launches
from ejkernel.testing.compare import LINEAR_TOLERANCES, assert_close, relative_rms
from ejkernel.testing.delta_cases import CASES, DeltaCase

ON_GPU = device_of(()).backend == "gpu"
pytestmark = [pytest.mark.gpu] if ON_GPU else []
TRITON = TritonDeltaRule()
# What an interpreter needs minutes for is left to the GPU: one case of each kind here, all of them there.
INTERPRETED = (
    "ungated", "head", "channel", "head-everything", "channel-everything", "ungated-correlated-near-two",
    "ungated-identical-near-two", "head-unit-zero", "time-0", "time-1", "odd-channels", "grouped-head",
    "packed-channel-reverse", "bfloat16-channel-infinite", "bfloat16-ungated", "float16-channel-strong",
    "bfloat16-128-channels-head-strong", "bfloat16-64-channels-channel-strong",
)  # fmt: skip
WIDE = [
    DeltaCase(
        f"{gate}-{kind}-{K}x{V}", batch=1, time=150, heads=4, key_heads=2, key_channels=K, value_channels=V, gate=gate,
        gate_kind=kind, initial_state=True, dtype="bfloat16",
    )
    for gate, (kind, K, V) in itertools.product(
        (None, "head", "channel"), (("mild", 64, 64), ("strong", 128, 128), ("resets", 256, 96), ("mild", 96, 256))
    )
    if gate or kind == "mild"
]  # fmt: skip

_WHOLE_TILES = list(itertools.product((None, "head", "channel"), itertools.product((64, 128), repeat=2)))
HOPPER = [  # by the scans of warpgroups there, by the portable ones elsewhere
    *(
        DeltaCase(
            f"{gate}-{K}x{V}-even", time=512, key_heads=1, key_channels=K, value_channels=V, gate=gate, dtype="bfloat16",
        )
        for gate, (K, V) in _WHOLE_TILES
    ),
    *(
        DeltaCase(
            f"{gate}-{K}x{V}-packed", lengths=(130, 0, 1, 300, 64), heads=4, key_channels=K, value_channels=V, gate=gate,
            gate_kind="strong", initial_state=True, reverse=K != V, dtype="bfloat16",
        )
        for gate, (K, V) in _WHOLE_TILES
    ),
]  # fmt: skip


@functools.cache
def expected(case):
    return case.expected(), case.tolerance


LONG = (
    "head-everything",
    "channel-everything",
    "grouped-head",
    "packed-channel-reverse",
    "float16-channel-strong",
    "head-unit-zero",
    "bfloat16-128-channels-head-strong",
    "bfloat16-64-channels-channel-strong",
)


def _cases():
    shared = [case for case in CASES if case.dtype != "float64"]
    return [*shared, *WIDE, *HOPPER] if ON_GPU else [_interpreted(case) for case in shared if case.name in INTERPRETED]


def _interpreted(case):
    return pytest.param(case, marks=pytest.mark.long) if case.name in LONG else case


@pytest.mark.parametrize("case", _cases(), ids=str)
def test_matches_float64(case):
    assert_close(case.evaluate(gated_delta_rule), *expected(case))


class MixedChunks(DeltaCase):
    """Three chunks of 64 rows: weakly gated, with resets in some of its last channels, and weakly gated in all heads but one,
    where one channel is forgotten at once."""

    def arguments(self):
        arrays, options = super().arguments()
        g = arrays["g"].at[:, 70:120:7, :, -3:].set(-1e4)
        return arrays | {"g": g.at[:, 140, -1, 1].set(-jnp.inf)}, options


MIXED = [
    MixedChunks("mixed", batch=1, time=150, heads=2, key_heads=1, key_channels=24, gate="channel", dtype="bfloat16"),
    MixedChunks(
        "mixed-two-turns", batch=1, time=190, heads=1, key_heads=1, key_channels=72, value_channels=136, gate="channel",
        initial_state=True, reverse=True, dtype="bfloat16",
    ),
]  # fmt: skip


@pytest.mark.parametrize("case", MIXED, ids=str)
def test_chunks_of_both_kinds(case):
    """What the exact kernels write lies between what is there of weakly gated chunks."""
    assert_close(case.evaluate(gated_delta_rule), *expected(case))


@pytest.mark.parametrize(("kind", "V"), [("strong", 128), ("resets", 256), ("infinite", 128), ("twenty", 64)])
@pytest.mark.skipif(not ON_GPU, reason="the interpreter takes too long for every kind of gate")
def test_strong_gates_of_128_channels(kind, V):
    """In the exact kernels' tiles as they are measured, where nothing is masked."""
    case = DeltaCase(
        "full", batch=1, time=320, key_channels=128, value_channels=V, gate="channel", gate_kind=kind, initial_state=True,
        dtype="bfloat16",
    )  # fmt: skip
    assert_close(case.evaluate(gated_delta_rule), *expected(case))


@pytest.mark.parametrize("case", _cases(), ids=str)
@pytest.mark.skipif(not ON_GPU, reason="the interpreter takes too long for every case twice")
def test_step_by_step_matches_float64(case):
    values, tolerance = expected(case)
    got = case.evaluate(functools.partial(gated_delta_rule, cfg=GatedDeltaRuleConfig("recurrent", 32)))
    assert_close(got, values, tolerance)


@pytest.mark.parametrize("gate", [None, "head", "channel"])
def test_a_few_steps(gate):
    case = DeltaCase("steps", time=3, gate=gate, initial_state=True, heads=2, key_heads=1, key_channels=24)
    assert "decode step" in TRITON.route(_planned(case), TRITON.heuristic(_planned(case)))
    assert_close(case.evaluate(gated_delta_rule), *expected(case))


SPLIT = [
    DeltaCase("split-head", time=75, heads=2, key_heads=1, gate="head", gate_kind="mild", initial_state=True),
    DeltaCase("split-channel", time=75, gate="channel", gate_kind="infinite", initial_state=True, reverse=True),
    DeltaCase("split-ungated", time=75, value_channels=40, key_kind="correlated"),
    DeltaCase(
        "split-packed", batch=1, time=120, gate="head", gate_kind="strong", lengths=(3, 0, 70, 1, 46), initial_state=True
    ),
    DeltaCase("split-bfloat16-channel", time=200, gate="channel", initial_state=True, dtype="bfloat16"),
    DeltaCase("split-bfloat16-head", time=200, gate="head", gate_kind="resets", key_channels=72, dtype="bfloat16"),
]
SPLIT_ON_HOPPER = [
    DeltaCase(
        f"split-{gate}-{K}x{V}", time=400, key_heads=1, key_channels=K, value_channels=V, gate=gate, initial_state=True,
        reverse=K == V, dtype="bfloat16",
    )
    for gate, (K, V) in _WHOLE_TILES
]  # fmt: skip


def _split_cases():
    some = [SPLIT[0], *(pytest.param(case, marks=pytest.mark.long) for case in SPLIT[1:])]
    return [*some, *SPLIT_ON_HOPPER] if ON_GPU else some


@pytest.mark.parametrize("case", _split_cases(), ids=str)
def test_sequences_in_segments(case, monkeypatch):
    """As a call with too few sequences and heads to fill a device is computed."""

    def taken(self, problem, cfg):
        return route_of(dataclasses.replace(delta_plan(problem, cfg), segment=1))

    monkeypatch.setattr(TritonDeltaRule, "taken", taken)
    cfg = GatedDeltaRuleConfig("chunked", 64 if case.dtype == "bfloat16" else 16)
    assert_close(case.evaluate(functools.partial(gated_delta_rule, cfg=cfg)), *expected(case))


def test_few_heads_are_scanned_in_segments():
    """So that a device is filled; what the forward pass keeps of them has the batch's size, whatever a mesh makes of it."""
    of = lambda **shape: DeltaCase("segments", heads=16, key_heads=16, value_channels=128, dtype="bfloat16", **shape).problem
    length = lambda problem: delta_plan(problem, TRITON.heuristic(problem)).segment
    assert length(of(batch=1, time=16384)) == 32
    assert length(of(batch=8, time=2048)) == 32
    assert length(of(batch=1, time=32768, lengths=(16384, 16384))) == 103  # of 514: one sequence might hold nearly all


@pytest.mark.parametrize("gate", [None, "head"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_correction_needs_no_queries(gate, dtype):
    """For a scan that makes the scores of queries itself."""
    case = DeltaCase("correction", batch=1, time=40, heads=2, key_heads=1, gate=gate, dtype=dtype)
    problem = _planned(case)
    plan = delta_plan(problem, TRITON.heuristic(problem))
    (all_of_it, rows), (alone, bare) = (
        head_gate_rows(Call.of(plan, dict(problem.differentiable), None), with_scores) for with_scores in (True, False)
    )
    assert rows.scores is not None
    assert bare.scores is None
    lower = np.tril(np.ones((plan.C, plan.C), bool))
    used = lambda x: np.where(lower, np.asarray(x, np.float32), 0.0)  # blocks above the diagonal are not written
    np.testing.assert_array_equal(used(all_of_it.Z), used(alone.Z))
    np.testing.assert_array_equal(np.asarray(all_of_it.betas), np.asarray(alone.betas))


def test_interpreted_cases_exist():
    assert set(LONG) <= set(INTERPRETED) <= {case.name for case in CASES}


@pytest.mark.long
@pytest.mark.parametrize(("gate", "dtype"), [("head", "bfloat16"), ("channel", "bfloat16"), ("channel", "float32")])
def test_every_candidate_is_right(gate, dtype):
    sizes = {"key_channels": 128, "value_channels": 128, "time": 130} if ON_GPU else {"key_channels": 32, "value_channels": 32}
    case = DeltaCase("tuned", batch=1, heads=1, key_heads=1, gate=gate, gate_kind="resets", dtype=dtype, **sizes)
    want, tolerance = expected(case)
    ignored = ("num_warps", "num_stages")  # by the interpreter
    tried: dict[Any, GatedDeltaRuleConfig] = {}
    for cfg in TRITON.candidates(_planned(case)):
        kind = cfg if ON_GPU else tuple((n, x) for n, x in sorted(vars(cfg).items()) if n not in ignored)
        tried.setdefault(kind, cfg)
    assert len(tried) > 1
    for cfg in (dataclasses.replace(cfg, backend="any") for cfg in tried.values()):
        assert_close(case.evaluate(functools.partial(gated_delta_rule, cfg=cfg)), want, tolerance)


def test_what_comes_later_changes_nothing_before():
    """Bit by bit with one gate per head: a chunk's earlier rows take no part in what later ones do."""
    case = DeltaCase("prefix", batch=1, time=70, gate="head", dtype="bfloat16")
    arrays, options = case.arguments()
    later = {name: x if name == "initial_state" else x.at[:, 40:].multiply(-0.5) for name, x in arrays.items()}
    run = lambda arrays: gated_delta_rule(**arrays, **options)[0][:, :40]
    np.testing.assert_array_equal(np.asarray(run(arrays), np.float32), np.asarray(run(later), np.float32))


@pytest.mark.parametrize("gate", ["head", "channel"])
def test_a_value_that_is_no_number_stays_in_its_sequence_and_head(gate):
    case = DeltaCase("poisoned", lengths=(20, 30, 9), gate=gate, dtype="bfloat16")
    arrays, options = case.arguments()
    poisoned = {**arrays, "value": arrays["value"].at[0, 30, 0].set(jnp.nan)}
    clean, dirty = (gated_delta_rule(**x, **options) for x in (arrays, poisoned))
    keep = np.ones(clean[0].shape[1:3], bool)
    keep[20:50, 0] = False  # the second sequence of the first head
    np.testing.assert_array_equal(np.asarray(clean[0], np.float32)[0][keep], np.asarray(dirty[0], np.float32)[0][keep])
    others = np.asarray(dirty[1])[[0, 2]], np.asarray(dirty[1])[:, 1]
    assert all(np.isfinite(x).all() for x in others)
    assert np.isnan(np.asarray(dirty[0], np.float32)[0, 30, 0]).all()


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_vmap_is_a_loop(packed):
    case = DeltaCase("mapped", batch=1, time=20, gate="head", lengths=(12, 8) if packed else None, initial_state=True)
    arrays, options = case.arguments()
    values = jnp.stack([arrays["value"], -arrays["value"]])
    loss = lambda v: jnp.sum(gated_delta_rule(**{**arrays, "value": v}, **options)[0] ** 2)
    one_by_one = jnp.stack([jax.grad(loss)(v) for v in values])
    assert relative_rms(jax.vmap(jax.grad(loss))(values), np.asarray(one_by_one, np.float64)) < LINEAR_TOLERANCES["float32"][0]


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_vmap_over_nothing(packed):
    case = DeltaCase("mapped", batch=1, time=20, gate="head", lengths=(12, 8) if packed else None, initial_state=True)
    arrays, options = case.arguments()
    none = jnp.zeros((0, *arrays["value"].shape))
    loss = lambda v: (lambda found: (jnp.sum(found[0]), found))(gated_delta_rule(**{**arrays, "value": v}, **options))
    slope, (output, state) = jax.vmap(jax.grad(loss, has_aux=True))(none)
    assert (slope.shape, output.shape, state.shape[0]) == (none.shape, none.shape, 0)


SETTINGS = {
    "x64": functools.partial(jax.enable_x64, True),
    "strict dtypes": functools.partial(jax.numpy_dtype_promotion, "strict"),
    "no rank promotion": functools.partial(jax.numpy_rank_promotion, "raise"),
    "no jit": jax.disable_jit,
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_of_jax_change_nothing(setting):
    case = DeltaCase("packed", lengths=(20, 0, 13), heads=1, key_heads=1, gate="head", initial_state=True, reverse=True)
    want, tolerance = expected(case)
    with SETTINGS[setting]():
        got = case.evaluate(gated_delta_rule, jit=setting != "no jit")
    assert_close(got, want, tolerance)


def test_a_gradient_leaks_nothing_from_its_trace():
    case = DeltaCase("leaks", batch=1, time=18, gate="head")
    arrays, _ = case.arguments()
    with jax.check_tracer_leaks():
        jax.jit(jax.grad(lambda arrays: jnp.sum(gated_delta_rule(**arrays)[0]))).lower(arrays)


def test_looking_for_nans_finds_none_in_what_the_gradient_keeps():
    """Called without `jit`, where JAX looks at that too: some of it is neither written nor read."""
    case = DeltaCase("nans", batch=1, time=21, gate="head", gate_kind="infinite", initial_state=True)
    with jax.debug_nans(True):
        got = case.evaluate(gated_delta_rule, jit=False)
    assert_close(got, *expected(case))


def test_the_normalisation_has_its_gradient():
    case = DeltaCase("normalised", batch=1, time=20, gate="channel", key_kind="raw", l2norm=True)
    assert_close(case.evaluate(gated_delta_rule), *expected(case))


def test_forward_mode_says_where_it_works():
    case = DeltaCase("jvp", batch=1, time=4)
    arrays, options = case.arguments()
    run = lambda v: gated_delta_rule(**{**arrays, "value": v}, **options)[0]
    with pytest.raises(TypeError, match="platform='xla'"):
        jax.jvp(run, (arrays["value"],), (arrays["value"],))


GATES = {None: (), "head": (2,), "channel": (2, None)}


def problem(gate, K, V, T, dtype="bfloat16", packed=False, capability=90):
    """A call as shapes."""
    of = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    arrays = {"query": of(1, T, 1, K), "key": of(1, T, 1, K), "value": of(1, T, 2, V), "beta": of(1, T, 2)}
    if gate is not None:
        arrays["g"] = of(1, T, 2, *([K] if gate == "channel" else []))
    if packed:
        arrays["cu_seqlens"] = of(4, dtype="int32")
    return DeltaProblem(**arrays, device=Device("gpu", "a GPU", capability))


@pytest.mark.parametrize("gate", GATES)
def test_every_call_has_one_route(gate):
    """Forward, gradient and candidates agree on it, for every dtype, size, length, packing and device."""
    sizes = [(16, 16), (24, 40), (128, 128), (256, 96), (100, 256)]
    dtypes = ["bfloat16", "float16", "float32"]
    for (K, V), T, dtype, capability, packed in itertools.product(sizes, (3, 20, 2048), dtypes, (80, 90), (False, True)):
        call = problem(gate, K, V, T, dtype, packed, capability)
        assert TRITON.supports(call) is None
        first, *_ = found = TRITON.candidates(call)
        assert first == TRITON.heuristic(call)
        assert len(set(found)) == len(found) <= MOST
        for cfg in found:
            assert TRITON.refuses(call, cfg) is None, cfg
        route = route_of(delta_plan(call, first))
        assert route == route_of(delta_plan(call, first))
        chunked = "head gate" if gate != "channel" else "key gate" if dtype == "bfloat16" and T > 32 else "general"
        name = f"delta rule, {chunked}"
        assert route.name == (f"delta rule, decode step (gradient: {name})" if T <= MAX_STEPS else name)
        seen = launches(route, arrays_of(call), call.cu_seqlens)
        assert seen.forward
        assert seen.backward


def test_every_route_is_taken_by_some_call():
    found = {
        type(route_of(delta_plan(c, TRITON.heuristic(c))))
        for c in (problem(g, 64, 64, T, d) for g in GATES for T in (1, 99) for d in ("bfloat16", "float32"))
    }
    assert found == set(ROUTES)


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"block_q": 128}, "block_q must be one of 16, 32, 64"), ({"block_k": 32}, "block_k must be None")],
)
def test_what_no_kernel_would_follow_is_refused(fields, words):
    cfg = GatedDeltaRuleConfig(**{"schedule": "chunked", "block_q": 64, **fields})
    assert words in TRITON.refuses(problem("head", 64, 64, 256), cfg)


def test_more_channels_than_a_program_holds_are_refused():
    assert "go up to 256; got 320 and 64" in TRITON.supports(problem("head", 320, 64, 256))


def _planned(case):
    arrays, options = case.arguments()
    return DeltaProblem.from_arguments(**arrays, **options)
