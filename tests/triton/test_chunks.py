"""How packed calls are cut into chunks and segments."""

import dataclasses
import itertools

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")

from ejkernel.kernels._linear import LinearConfig
from ejkernel.kernels._linear.operations import recurrent as recurrent_problem
from ejkernel.kernels._triton.linear import _solve
from ejkernel.kernels._triton.linear._chunks import LENGTH_CLASSES, Chunks, Segments, owner
from ejkernel.kernels._triton.linear._plan import Plan

LIMITS = pytest.mark.parametrize("limit", [1 << 22, 0], ids=["compared with all", "searched"])


def packed(lengths, reverse=False, **changes):
    T = sum(lengths)
    cu_seqlens = jnp.cumsum(jnp.asarray([0, *lengths], jnp.int32), dtype=jnp.int32)
    x = jnp.ones((1, T, 1, 16), jnp.bfloat16)
    problem = recurrent_problem(x, x, x, cu_seqlens=cu_seqlens, reverse=reverse)
    plan = dataclasses.replace(Plan.of(problem, LinearConfig("chunked", 64)), **changes)
    return Chunks.of(plan, 1, T, cu_seqlens)


@pytest.mark.parametrize("reverse", [False, True])
def test_chunks_hold_every_token_once(reverse):
    lengths = [5, 0, 200, 64, 0, 129]
    token, rows, seq = np.asarray(packed(lengths, reverse).table)
    sign = -1 if reverse else 1
    tokens = np.concatenate([t + sign * np.arange(n) for t, n in zip(token, rows, strict=True)])
    np.testing.assert_array_equal(np.sort(tokens), np.arange(sum(lengths)))
    np.testing.assert_array_equal(np.bincount(seq, rows, minlength=6), lengths)


@LIMITS
@pytest.mark.parametrize(
    "lengths", [[96, 4100, 777, 0, 2048, 300, 5000], [512] * 9, [5000], [0, 0, 12345], [*range(0, 6000, 120)], [70] * 300]
)
def test_segments_start_with_the_longest_and_hold_every_chunk_once(lengths, limit):
    segments = Segments.of(packed(lengths, compare_all=limit), len(lengths), len(lengths) * 16)
    segment, first, count, seq, place, total = np.asarray(segments.table)
    used = seq >= 0
    assert (np.diff(count[used]) <= segments.length / LENGTH_CLASSES).all()
    assert len(set(segment[used])) == used.sum()
    assert segment[used].max() < segments.count
    held = np.concatenate([np.arange(f, f + n) for f, n in zip(first[used], count[used], strict=True)])
    np.testing.assert_array_equal(np.sort(held), np.arange(sum(-(-n // 64) for n in lengths)))
    if max(lengths) >= 4096:
        assert max(count) == segments.length < max(lengths) // 64  # the longest sequence is split
    for i in range(len(lengths)):  # also the empty one has a segment: it hands its state on
        assert total[seq == i][0] == max(1, -(-lengths[i] // 64 // segments.length)) == (seq == i).sum()
        in_order = np.argsort(place[seq == i])
        np.testing.assert_array_equal(place[seq == i][in_order], np.arange(total[seq == i][0]))
        np.testing.assert_array_equal(np.diff(segment[seq == i][in_order]), 1)


@pytest.mark.parametrize(("programs", "segments"), [(16, 16), (64, 4), (119, 2), (120, 1), (1000, 1)])
def test_sequences_are_split_while_programs_are_few(programs, segments):
    x = jnp.ones((1, 64 * 128, 1, 16), jnp.bfloat16)
    chunks = Chunks.of(Plan.of(recurrent_problem(x, x, x), LinearConfig("chunked", 64)), 1, 64 * 128, None)
    assert Segments.of(chunks, 1, programs).per_sequence == segments


@LIMITS
def test_owner(limit):
    first = jnp.asarray([0, 2, 2, 5, 9])
    np.testing.assert_array_equal(owner(first, jnp.arange(11), limit), [0, 0, 2, 2, 2, 3, 3, 3, 3, 3, 3])


@pytest.mark.parametrize("compare_all", [1 << 22, 1])
def test_gradients_per_sequence(compare_all, monkeypatch):
    """Sums over packed sequences, empty ones among them, few or many: nothing of one reaches another."""
    monkeypatch.setattr(_solve, "COMPARE_ALL", compare_all)
    offsets = np.array([0, 5, 5, 300, 301, 1000, 1000], np.int32)
    x = np.random.default_rng(0).standard_normal((1, 1000, 3), np.float32)
    x[0, 300] = np.nan
    got = np.asarray(_solve._per_sequence(jnp.asarray(x), jnp.asarray(offsets)))
    want = np.stack([x[0, a:b].astype(np.float64).sum(0) for a, b in itertools.pairwise(offsets)])
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)
