"""How packed calls are cut into chunks and segments."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton", reason="the triton platform needs Triton")

from ejkernel.kernels._linear import LinearConfig
from ejkernel.kernels._linear.operations import recurrent as recurrent_problem
from ejkernel.kernels._triton.linear import _solve
from ejkernel.kernels._triton.linear._chunks import PROGRAMS_TO_FILL, Chunks, Segments, Tables, owner, segment_length
from ejkernel.kernels._triton.linear._launches import Row, arrays_of, launches
from ejkernel.kernels._triton.linear._plan import Plan
from ejkernel.kernels._triton.linear.kernels import packed_tables
from ejkernel.kernels._triton.linear.routes import route_of
from ejkernel.testing import segment_model
from ejkernel.testing.linear_gpu import LENGTHS

LENGTH_CLASSES = packed_tables.LENGTH_CLASSES.value


def plan(reverse=False, **changes):
    x = jnp.ones((1, 64, 1, 16), jnp.bfloat16)
    usual = Plan.of(recurrent_problem(x, x, x, reverse=reverse), LinearConfig("chunked", 64))
    return dataclasses.replace(usual, **changes)


def packed(lengths):
    return Chunks.of(plan(), 1, sum(lengths), jnp.asarray(np.cumsum([0, *lengths]), jnp.int32))


def tables_by_hand(lengths, chunk, length, reverse):
    """(columns of the chunks' table, columns of the segments' table) without those that no sequence uses."""
    chunks: list[tuple[int, ...]] = []
    segments: list[tuple[int, ...]] = []
    token = 0
    for seq, tokens in enumerate(lengths):
        first, n = len(chunks), -(-tokens // chunk)
        for place in range(0, tokens, chunk):
            at = token + tokens - 1 - place if reverse else token + place
            chunks.append((at, min(tokens - place, chunk), seq))
        cuts = [*range(0, n, length)] or [0]
        for place, cut in enumerate(cuts):
            segments.append((first // length + seq + place, first + cut, min(n - cut, length), seq, place, len(cuts)))
        token += tokens
    in_class = lambda segment: -1 if segment[2] == length else (length - 1 - segment[2]) * LENGTH_CLASSES // length
    return chunks, sorted(segments, key=in_class)  # a stable sort: a class has its segments in their own order


def assert_tables(lengths, chunk, length, reverse=False, together=True):
    offsets = jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)
    count = sum(lengths) // chunk + len(lengths)
    made = Tables(plan(reverse, C=chunk), count, offsets)
    first = None if together else made.chunks
    segments, chunks = np.asarray(made.segments(length)), np.asarray(made.chunks)
    assert first is None or first is made.chunks
    want_chunks, want_segments = tables_by_hand(lengths, chunk, length, reverse)
    used = len(want_chunks)
    np.testing.assert_array_equal(chunks[:, :used].T, np.array(want_chunks, np.int32).reshape(-1, 3))
    np.testing.assert_array_equal(chunks[1, used:], 0)
    np.testing.assert_array_equal(chunks[2, used:], len(lengths) - 1)  # there is a g_gamma to read
    used = len(want_segments)
    np.testing.assert_array_equal(segments[:, :used].T, want_segments)
    np.testing.assert_array_equal(segments[3, used:], -1)
    assert set(segments[0]) == set(range(segments.shape[1]))  # every column is written
    assert segments[0].max() < segments.shape[1]


@pytest.mark.parametrize("together", [True, False], ids=["one launch", "chunks first"])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize(
    "lengths",
    [
        [96, 4100, 777, 0, 2048, 300, 5000], [512] * 9, [5000], [0], [0, 0, 12345], [4, 0], [*range(0, 6000, 120)], [70] * 300,
        [64] * 64, [0] * 65, [*[1] * 63, 1000, 0, 3],
    ],
    ids=lambda lengths: f"{len(lengths)} sequences, {sum(lengths)} tokens",
)  # fmt: skip
def test_tables(lengths, reverse, together):
    assert_tables(lengths, 64, 17, reverse, together)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.one_of(st.integers(0, 40), st.sampled_from([0, 1, 16, 15, 17, 300])), min_size=1, max_size=80),
    st.sampled_from([16, 64]),
    st.integers(1, 40),
    st.booleans(),
    st.booleans(),
)
def test_tables_of_any_sequences(lengths, chunk, length, reverse, together):
    assert_tables(lengths, chunk, length, reverse, together)


@pytest.mark.parametrize("mapped", [False, True], ids=["offsets alike", "offsets mapped"])
def test_tables_under_jit_and_vmap(mapped):
    many = [[0, 5, 5, 200, 300], [0, 128, 192, 192, 300], [0, 0, 0, 0, 300]]
    offsets = jnp.asarray(many if mapped else many[0], jnp.int32)
    columns = lambda offsets: (lambda made: (made.segments(3), made.chunks))(Tables(plan(), 8, offsets))
    found = jax.jit(jax.vmap(lambda _, offsets: columns(offsets), in_axes=(0, 0 if mapped else None)))(jnp.arange(3), offsets)
    for i, one in enumerate(many if mapped else many[:1] * 3):
        for got, want in zip(found, columns(jnp.asarray(one, jnp.int32)), strict=True):
            np.testing.assert_array_equal(got[i], want)


def test_long_sequences_are_split_and_the_longest_segments_start_first():
    lengths = [96, 4100, 777, 0, 2048, 300, 5000]
    segments = Segments.of(packed(lengths), len(lengths), len(lengths) * 16)
    _, _, count, seq, _, _ = np.asarray(segments.table)
    assert (np.diff(count[seq >= 0]) <= segments.length / LENGTH_CLASSES).all()
    assert max(count) == segments.length < max(lengths) // 64


@pytest.mark.parametrize(("programs", "segments"), [(16, 16), (64, 4), (119, 2), (120, 1), (1000, 1)])
def test_sequences_are_split_while_programs_are_few(programs, segments):
    chunks = Chunks.of(plan(), 1, 64 * 128, None)
    assert Segments.of(chunks, 1, programs).per_sequence == segments


@pytest.mark.parametrize("H", [1, 4, 16, 33, 132, 500])
@pytest.mark.parametrize("count", [1, 90, 528, 4000])
def test_packed_segments_are_whole_turns_of_programs(count, H):
    """Two programs for each of the 264 that the device has room for, or a whole sequence where it has no room for one."""
    length = segment_length(plan(), count, count, 4, 4 * H * 2, packed=True)
    assert length >= 8
    segments = -(-count // length)
    assert segments == 1 or segments * H * 2 <= 2 * PROGRAMS_TO_FILL


@pytest.mark.parametrize("call", segment_model.CALLS.values(), ids=segment_model.CALLS)
def test_packed_segments_are_faster_by_the_model_than_one_more_of_them(call):
    """On the benchmark's row, as it was measured; not of every mix of lengths."""
    length = segment_length(plan(), 528, 528, 16, 16 * 16 * 2, packed=True)
    assert length == 33
    ours, one_more = (sum(call.microseconds(LENGTHS, 16, length)) for length in (length, 32))
    assert ours < 0.95 * one_more


def test_the_model_says_what_was_measured():
    """In milliseconds, benchmarks/NOTES_gpu.md: ends of segments of 31 and of 28 chunks, and both passes as they are."""
    head, key = segment_model.CALLS.values()
    found = [head.microseconds(LENGTHS, 16, 31)[0], head.microseconds(LENGTHS, 16, 28)[0], *head.microseconds(LENGTHS, 16, 32)]
    np.testing.assert_allclose([*found, *key.microseconds(LENGTHS, 16, 32)], [49.8, 69, 48, 149, 123, 322], rtol=0.06)


@pytest.mark.parametrize("limit", [1 << 22, 0], ids=["compared with all", "searched"])
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


@pytest.mark.parametrize("gates", [(), ("g",), ("g_gamma",), ("gk",)], ids=lambda gates: " ".join(gates) or "none")
def test_a_packed_call_makes_its_tables_in_one_launch(gates):
    """Forward and backward alike, so that XLA makes them once for both."""
    row = Row(gates, 128, 128)
    taken, offsets = route_of(Plan.of(row.problem(), row.cfg)), jax.ShapeDtypeStruct((4,), jnp.int32)
    arrays = {
        name: jax.ShapeDtypeStruct((3, 2) if name == "g_gamma" else x.shape, x.dtype)
        for name, x in arrays_of(row.problem()).items()
    }
    found = launches(taken, arrays, offsets)
    made = [[launch for launch in each if launch.name == "packed_tables"] for each in (found.forward, found.backward)]
    assert [len(each) for each in made] == [1, 1]
    assert [[x.shape for x in each[0].outputs] for each in made] == [[(3, 35), (6, 7)]] * 2
