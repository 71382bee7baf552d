"""Weakly gated chunks take a shorter way than the exact tree: which ones are, and that both ways agree."""

import dataclasses
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")
import triton
import triton.language as tl

from ejkernel._device import device_of
from ejkernel.callib import _interpreted, triton_call
from ejkernel.kernels._linear import LinearConfig
from ejkernel.kernels._linear.operations import recurrent as recurrent_problem
from ejkernel.kernels._triton.linear._call import Call
from ejkernel.kernels._triton.linear._plan import Plan
from ejkernel.kernels._triton.linear.kernels.tiles import nearest_tf32
from ejkernel.kernels._triton.linear.routes import route_of
from ejkernel.kernels._triton.linear.routes.rows import rows_of_keys
from ejkernel.kernels._triton.linear.routes.scans import Begun, Ends, Scanned, scan_rows
from ejkernel.testing.compare import relative_rms
from tests.triton.along import plan_of, run_along
from tests.triton.linear_cases import Case
from tests.triton.linear_reference import value_and_grads
from tests.triton.test_interpreted import run

pytestmark = pytest.mark.skipif(device_of(()).backend != "cpu", reason="the interpreter's own tests")


def test_a_chunk_is_weakly_gated_up_to_a_sum_of_80_in_every_channel():
    steps = [-0.05, -1.2, -1.3, 0.5, 2.0, 0.0, -jnp.inf, -1e4]
    gk = jnp.repeat(jnp.asarray(steps), 64)[None, :, None, None] * jnp.ones((1, 1, 2, 16))
    gk = gk.at[0, 5 * 64 + 7, 1, 3].set(-1e4)  # one channel of one head is enough
    x = jnp.ones((1, 8 * 64, 2, 16), jnp.bfloat16)
    problem = recurrent_problem(x, x, x, gk=gk)
    arrays = {name: getattr(problem, name) for name in ("query", "key", "value", "gk")}
    rows = rows_of_keys(Call.of(Plan.of(problem, LinearConfig("chunked", 64)), arrays, None), block_decays=True)
    np.testing.assert_array_equal(rows.gates.weak, np.asarray([[1, 1, 0, 1, 0, 1, 0, 0], [1, 1, 0, 1, 0, 0, 0, 0]]).T)


CASES = [
    Case(("gk",), shape=(1, 80, 1, 1, 40, 24), state=True, reverse=True, dtype="bfloat16", block_q=64),
    Case(("gk", "gv"), shape=(1, 80, 1, 1, 24, 40), state=True, dtype="bfloat16", block_q=64),
]


def worst(got, want) -> float:
    """The largest error of all values and gradients."""
    (values, grads), (want_values, want_grads) = got, want
    pairs = [*zip(values, want_values, strict=True), *((grads[name], want_grads[name]) for name in grads)]
    return max(relative_rms(x, y) for x, y in pairs)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_both_ways_agree(case):
    want = value_and_grads(case.arrays(), case.weights(), case.shape[4] ** -0.5, case.reverse, case.cu_seqlens)
    for most in (80.0, -1.0):
        route = route_of(plan_of(case, weak_limit=most))
        assert worst(run_along(case, route), want) < 6e-3, most


def scanned_in_part(call, q, k, v, begin, output, segments, *, adjoint=False, keep, done=None):
    """What `key_gate_scan_by_warpgroups` hands over, by portable kernels: every other head of a sequence, NaN elsewhere."""
    rows = rows_of_keys(call, block_decays=False, low=True).as_arguments(low=adjoint, adjoint=adjoint)
    o, final, states = scan_rows(call, rows, v, begin, output, wide=False, adjoint=adjoint, keep=keep)
    H, chunks = call.dims[2], call.chunks
    seq = jnp.arange(chunks.count) // chunks.per_sequence if chunks.table is None else chunks.table[2]
    of_sequences = (jnp.arange(call.sequences)[:, None] + jnp.arange(H)) % 2  # [N, H]: of one segment each
    of_chunks = of_sequences[seq]
    if call.cu_seqlens is None:
        of_tokens = jnp.repeat(of_sequences[:, None], call.dims[1], 1)  # [B, T, H]
    else:
        of_tokens = jnp.repeat(of_sequences, jnp.diff(call.cu_seqlens), 0, total_repeat_length=call.dims[1])[None]
    left = lambda x, kept: None if x is None else jnp.where(jnp.expand_dims(kept, range(kept.ndim, x.ndim)) != 0, x, jnp.nan)
    is_empty = False if call.cu_seqlens is None else (jnp.diff(call.cu_seqlens) == 0)[:, None]  # nothing is left of those
    begun = Scanned(left(o, of_tokens), left(final, of_sequences | is_empty), left(states, of_chunks))
    return Begun(segments, Ends(), of_chunks.astype(jnp.int32) if done is None else done, begun)


IN_PART = [
    Case(("gk",), shape=(2, 130, 2, 1, 64, 64), state=True, dtype="bfloat16", gate_dtype="bfloat16", block_q=64),
    Case(("gk",), shape=(1, 130, 2, 2, 64, 64), cu_seqlens=(0, 5, 5, 70, 130), state=True, reverse=True, dtype="bfloat16",
         gate_dtype="bfloat16", block_q=64),
]  # fmt: skip


@pytest.mark.parametrize("case", IN_PART, ids=str)
def test_what_a_scan_by_warpgroups_has_left_is_filled_up(case, monkeypatch):
    route = route_of(plan_of(case))
    want = run_along(case, route)
    module = sys.modules[type(route).__module__]
    monkeypatch.setattr(module, "_in_one_scan", lambda plan, arrays: True)
    scans: list[bool] = []

    def counted(*args, adjoint=False, **rest):
        scans.append(adjoint)
        return scanned_in_part(*args, adjoint=adjoint, **rest)

    monkeypatch.setattr(module, "_scan_weak_segments", counted)
    jax.clear_caches()  # of the route as it is
    found = run_along(case, route)
    assert set(scans) == {False, True}
    jax.tree.map(np.testing.assert_array_equal, found, want)


def test_a_chunk_is_left_to_the_exact_kernels_by_any_of_its_turns():
    """128 channels are 64 in each of two turns: a reset in the last one, which the first knows nothing of."""

    class ResetInTheLastChannel(Case):
        def arrays(self, seed=0):
            arrays = super().arrays(seed)
            return arrays | {"gk": arrays["gk"].at[:, 70, :, -1].set(-1e4)}

    case = ResetInTheLastChannel(("gk",), shape=(1, 150, 1, 1, 72, 24), state=True, dtype="bfloat16", block_q=64)
    want = value_and_grads(case.arrays(), case.weights(), case.shape[4] ** -0.5, case.reverse, None)
    assert worst(run(case), want) < 6e-3
    rows = rows_of_keys(Call.of(plan_of(case), case.arrays(), None), block_decays=False)
    np.testing.assert_array_equal(rows.gates.weak, [[1], [0], [1]])


def test_gates_at_the_limit_lose_nothing():
    class AtTheLimit(Case):
        def arrays(self, seed=0):
            arrays = super().arrays(seed)
            return arrays | {"gk": jnp.full_like(arrays["gk"], -79.9 / 64)}

    case = AtTheLimit(**dataclasses.asdict(CASES[0]))
    want = value_and_grads(case.arrays(), case.weights(), case.shape[4] ** -0.5, case.reverse, None)
    assert worst(run(case), want) < 6e-3


def test_scores_are_not_biased_where_tf32_products_cut_digits_off(monkeypatch):
    """Hopper's tensor cores read 10 bits of a tf32 operand and cut the others off: 7e-4 of every score if they are not 0."""
    from triton.runtime import interpreter

    _interpreted._mend_bfloat16()  # before, so that it is not undone with the change below
    usual = interpreter.InterpreterBuilder.create_dot

    def cut(handle):
        if handle.data.dtype != np.float32 or handle.dtype.primitive_bitwidth != 32:
            return handle
        return interpreter.TensorHandle((handle.data.view(np.int32) & -0x2000).view(np.float32), handle.dtype)

    monkeypatch.setattr(
        interpreter.InterpreterBuilder, "create_dot", lambda self, a, b, *rest: usual(self, cut(a), cut(b), *rest)
    )
    keys = jax.random.split(jax.random.key(0), 3)
    q, k = (jax.random.uniform(key, (1, 64, 1, 32), minval=0.5).astype(jnp.bfloat16) for key in keys[:2])
    gk = -jax.random.uniform(keys[2], (1, 64, 1, 32)) / 16
    problem = recurrent_problem(q, k, k, gk=gk)
    arrays = {name: getattr(problem, name) for name in ("query", "key", "value", "gk")}
    call = Call.of(Plan.of(problem, LinearConfig("chunked", 64)), arrays, None)
    rows = rows_of_keys(call, block_decays=False, low=True)
    found = (np.asarray(rows.scores, np.float64) + np.asarray(rows.scores_low, np.float64))[0, 0]
    c = np.cumsum(np.asarray(gk, np.float64)[0, :, 0], 0)
    wide = [np.asarray(x, np.float64)[0, :, 0] for x in (q, k)]
    want = np.einsum("tc,sc,tsc->ts", *wide, np.exp(c[:, None] - c[None])) * 32**-0.5
    below = np.tril_indices(64)
    assert abs(np.mean(found[below] / want[below] - 1)) < 1e-4


@triton.jit
def _rounded(x, o):
    i = tl.arange(0, 8)
    tl.store(o + i, nearest_tf32(tl.load(x + i)))


def test_rounding_to_tf32_keeps_what_is_not_finite():
    """0x7fffffff, the NaN that a GPU's arithmetic makes, among it."""
    bits = [0x7FFFFFFF, 0x7FC00000, 0xFFC00000, 0x7F800000, 0xFF800000, 0x3F800FFF, 0x3F801000, 0xBF801000]
    x = jnp.asarray(np.asarray(bits, np.uint32).view(np.float32))
    out = jax.ShapeDtypeStruct((8,), jnp.float32)
    found = np.asarray(triton_call(arguments={"x": x}, out_shape={"o": out}, kernel=_rounded, grid=(1,), num_warps=1)["o"])
    step = 2.0**-10
    np.testing.assert_array_equal(found, [np.nan, np.nan, np.nan, np.inf, -np.inf, 1, 1 + step, -1 - step])
