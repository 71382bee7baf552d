"""MaskInfo: every method against plain NumPy."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ejkernel.types.mask import (
    MaskInfo,
    mask_to_segment_ids,
    segment_ids_to_mask,
    segment_ids_to_qkv_masks,
    segment_positions,
)

IDS = np.array([[0, 0, 1, 1, 1, -1], [2, 2, 2, 2, 5, 5]])
POSITIONS = np.array([[0, 1, 0, 1, 2, 0], [0, 1, 2, 3, 0, 1]])


def same_segment(q: np.ndarray, kv: np.ndarray) -> np.ndarray:
    return ((q[:, :, None] == kv[:, None, :]) & (q[:, :, None] >= 0))[:, None]


def mask_of(info: MaskInfo) -> np.ndarray:
    return np.asarray(info.get_or_compute_attention_mask())


@pytest.fixture
def packed() -> MaskInfo:
    return MaskInfo.from_segments(jnp.asarray(IDS))


@pytest.fixture
def pairs() -> np.ndarray:
    return np.random.default_rng(0).random((2, 3, 4, 5)) < 0.5


def test_from_a_mask_of_every_rank(pairs):
    info = MaskInfo.from_attention_mask(jnp.asarray(pairs))
    np.testing.assert_array_equal(info.attention_mask, pairs)
    assert (info.shape, info.batch_size, info.q_len, info.kv_len) == ((2, 3, 4, 5), 2, 4, 5)
    assert not info.is_self_attention
    np.testing.assert_array_equal(MaskInfo.from_attention_mask(pairs[:, 0]).attention_mask, pairs[:, :1])
    keys = MaskInfo.from_attention_mask(pairs[:, 0, 0])
    np.testing.assert_array_equal(keys.attention_mask, np.broadcast_to(pairs[:, 0, 0][:, None, None, :], (2, 1, 5, 5)))
    assert keys.is_self_attention
    np.testing.assert_array_equal(MaskInfo.from_attention_mask(np.array([[1, 0]])).attention_mask[0, 0], [[True, False]] * 2)


def test_from_segments(packed):
    assert packed.attention_mask is None
    assert packed.shape == (2, 1, 6, 6)
    np.testing.assert_array_equal(mask_of(packed), same_segment(IDS, IDS))
    np.testing.assert_array_equal(packed.kv_segment_ids, IDS)
    for positions in packed.get_or_compute_positions():
        np.testing.assert_array_equal(positions, POSITIONS)


def test_from_segments_of_queries_and_keys():
    kv = np.array([[0, 1, 1, -1], [5, 5, 2, 7]])
    info = MaskInfo.from_segments(IDS, kv, kv_positions=np.arange(8).reshape(2, 4))
    np.testing.assert_array_equal(mask_of(info), same_segment(IDS, kv))
    q, k = info.get_or_compute_positions()
    np.testing.assert_array_equal(q, POSITIONS)
    np.testing.assert_array_equal(k, np.arange(8).reshape(2, 4))


def test_positions_of_queries_serve_keys_that_have_none_of_their_own():
    info = MaskInfo.from_segments(IDS, q_positions=POSITIONS + 3)
    np.testing.assert_array_equal(info.kv_positions, POSITIONS + 3)


@pytest.mark.parametrize(("total", "padding"), [(None, 0), (9, 2)])
def test_from_cu_seqlens(total, padding):
    info = MaskInfo.from_cu_seqlens(jnp.array([0, 3, 3, 7]), total)
    np.testing.assert_array_equal(info.q_segment_ids, [[0, 0, 0, 2, 2, 2, 2] + [-1] * padding])
    np.testing.assert_array_equal(info.q_positions, [[0, 1, 2, 0, 1, 2, 3] + [0] * padding])
    np.testing.assert_array_equal(info.kv_positions, info.q_positions)


def test_from_traced_cu_seqlens_needs_a_total():
    traced = jax.jit(lambda cu: MaskInfo.from_cu_seqlens(cu, 7))(jnp.array([0, 3, 7]))
    np.testing.assert_array_equal(traced.q_segment_ids, [[0, 0, 0, 1, 1, 1, 1]])
    with pytest.raises(ValueError, match="total must be given"):
        jax.jit(MaskInfo.from_cu_seqlens)(jnp.array([0, 3, 7]))


@pytest.mark.parametrize("cu_seqlens", [[0, 3, 7], (0, np.int8(3), 7), np.array([0, 3, 7], np.uint8)])
def test_offsets_that_are_known_inside_jit_need_no_total(cu_seqlens):
    info = jax.jit(lambda: MaskInfo.from_cu_seqlens(cu_seqlens))()
    np.testing.assert_array_equal(info.q_segment_ids, [[0, 0, 0, 1, 1, 1, 1]])
    with pytest.raises(ValueError, match="cu_seqlens must not exceed total, 6; got 7 last"):
        jax.jit(lambda: MaskInfo.from_cu_seqlens(cu_seqlens, 6))()


def test_from_cu_seqlens_of_an_open_length():
    tokens = jax.export.symbolic_shape("tokens")[0]
    mask = jax.jit(lambda row, offsets: MaskInfo.from_cu_seqlens(offsets, row.shape[0]).get_or_compute_attention_mask())
    shapes = jax.ShapeDtypeStruct((tokens,), jnp.float32), jax.ShapeDtypeStruct((4,), jnp.int32)
    offsets = jnp.array([0, 2, 2, 5])
    for total in (5, 7):
        found = jax.export.export(mask)(*shapes).call(jnp.ones(total), offsets)
        np.testing.assert_array_equal(found, MaskInfo.from_cu_seqlens(offsets, total).get_or_compute_attention_mask())


def test_traced_offsets_are_taken_at_their_word():
    rows = jax.vmap(lambda cu: MaskInfo.from_cu_seqlens(cu, 4).q_segment_ids[0])(jnp.array([[0, 1, 4], [0, 2, 9]]))
    np.testing.assert_array_equal(rows, [[0, 1, 1, 1], [0, 0, 1, 1]])


def test_bias(packed):
    bias = np.asarray(packed.bias)
    assert bias.dtype == np.float32
    np.testing.assert_array_equal(bias, np.where(same_segment(IDS, IDS), 0, -np.inf))


def test_segment_ids_of_a_mask(packed):
    q, kv = MaskInfo.from_attention_mask(packed.get_or_compute_attention_mask()).get_or_compute_segment_ids()
    expected = [[0, 0, 1, 1, 1, -1], [0, 0, 0, 0, 1, 1]]
    np.testing.assert_array_equal(q, expected)
    np.testing.assert_array_equal(kv, expected)
    q, kv = MaskInfo.from_attention_mask(packed.get_or_compute_attention_mask()).get_or_compute_positions()
    np.testing.assert_array_equal(q, POSITIONS)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(-1, 4), min_size=1, max_size=8), st.lists(st.integers(-1, 4), min_size=1, max_size=8))
def test_segment_ids_and_masks_are_inverse(q, kv):
    mask = segment_ids_to_mask(jnp.array([q]), jnp.array([kv]))
    np.testing.assert_array_equal(mask, same_segment(np.array([q]), np.array([kv])))
    np.testing.assert_array_equal(segment_ids_to_mask(*mask_to_segment_ids(mask)), mask)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(-1, 3), min_size=0, max_size=9))
def test_positions_count_within_a_segment(ids):
    expected = [0 if x < 0 else ids[:n].count(x) for n, x in enumerate(ids)]
    np.testing.assert_array_equal(segment_positions(jnp.array([ids], jnp.int32)), np.array([expected]).reshape(1, -1))


@pytest.mark.parametrize("mask", [np.tril(np.ones((3, 3), bool)), np.array([[1, 1, 0], [0, 1, 1], [0, 0, 0]], bool)])
def test_a_mask_that_segments_cannot_express_raises(mask):
    with pytest.raises(ValueError, match="cannot be expressed by segment ids"):
        mask_to_segment_ids(mask[None])
    with pytest.raises(Exception, match="cannot be expressed by segment ids"):
        jax.block_until_ready(jax.jit(mask_to_segment_ids)(mask[None]))


def test_heads_that_differ_are_no_segments():
    mask = np.stack([np.eye(3, dtype=bool), np.ones((3, 3), bool)])[None]
    with pytest.raises(ValueError, match="same in every head"):
        mask_to_segment_ids(mask)


def test_segment_ids_to_qkv_masks():
    q, kv, mask = segment_ids_to_qkv_masks(jnp.asarray(IDS), jnp.array([[0, -1], [2, 9]]))
    np.testing.assert_array_equal(q, IDS >= 0)
    np.testing.assert_array_equal(kv, [[True, False], [True, True]])
    np.testing.assert_array_equal(mask, same_segment(IDS, np.array([[0, -1], [2, 9]])))


@pytest.mark.parametrize("offset", [0, 2, -1])
def test_apply_causal(packed, pairs, offset):
    i, j = np.arange(4)[:, None], np.arange(5)
    causal = MaskInfo.from_attention_mask(pairs).apply_causal(offset)
    np.testing.assert_array_equal(causal.attention_mask, pairs & (j <= i + offset))
    expected = mask_of(packed) & (POSITIONS[:, None, None, :] <= POSITIONS[:, None, :, None] + offset)
    np.testing.assert_array_equal(packed.apply_causal(offset).attention_mask, expected)


@pytest.mark.parametrize(("window", "left", "right"), [(1, 1, 1), ((2, 0), 2, 0), (0, 0, 0)])
def test_apply_sliding_window(pairs, window, left, right):
    distance = np.arange(5) - np.arange(4)[:, None] - 1
    got = MaskInfo.from_attention_mask(pairs).apply_sliding_window(window, offset=1).attention_mask
    np.testing.assert_array_equal(got, pairs & (distance >= -left) & (distance <= right))


def test_apply_chunked(packed):
    got = packed.apply_chunked(2, offset=1).attention_mask
    chunk = lambda x: x // 2
    expected = mask_of(packed) & (chunk(POSITIONS)[:, None, None, :] == chunk(POSITIONS + 1)[:, None, :, None])
    np.testing.assert_array_equal(got, expected)


SQUARE = np.random.default_rng(1).random((5, 2, 3, 5)) < 0.8  # as many rows as keys, where a wrong broadcast goes unseen
ROWS = np.array([0, 2, -1, 4, -3])
APPLIED = {
    "causal": (lambda info, offset: info.apply_causal(offset), lambda q, k: k <= q),
    "window": (lambda info, offset: info.apply_sliding_window((2, 1), offset), lambda q, k: (q - 2 <= k) & (k <= q + 1)),
    "chunked": (lambda info, offset: info.apply_chunked(2, offset), lambda q, k: k // 2 == q // 2),
}


@pytest.mark.parametrize("dtype", [np.int8, np.int64])
@pytest.mark.parametrize("name", APPLIED)
def test_an_offset_for_each_row(name, dtype):
    apply, keeps = APPLIED[name]
    i, j = np.arange(3)[None, None, :, None], np.arange(5)[None, None, None, :]
    expected = SQUARE & keeps(i + ROWS[:, None, None, None], j)
    info = MaskInfo.from_attention_mask(SQUARE)
    offsets = ROWS.astype(dtype)
    np.testing.assert_array_equal(apply(info, offsets).attention_mask, expected)
    np.testing.assert_array_equal(jax.jit(lambda offset: apply(info, offset).attention_mask)(offsets), expected)
    one_row = jax.vmap(lambda mask, offset: apply(MaskInfo.from_attention_mask(mask[None]), offset).attention_mask[0])
    np.testing.assert_array_equal(one_row(SQUARE, offsets), expected)
    np.testing.assert_array_equal(apply(info, dtype(2)).attention_mask, apply(info, 2).attention_mask)


def test_windows_and_chunks_may_be_numpy_or_traced_numbers(packed):
    window = lambda left, right: packed.apply_sliding_window((left, right)).attention_mask
    np.testing.assert_array_equal(window(np.int8(2), jnp.int32(1)), window(2, 1))
    np.testing.assert_array_equal(jax.jit(window)(2, 1), window(2, 1))
    sizes = jnp.array([1, 2, 5])
    chunked = lambda size: packed.apply_chunked(size).attention_mask
    np.testing.assert_array_equal(jax.vmap(chunked)(sizes), np.stack([chunked(int(size)) for size in sizes]))
    np.testing.assert_array_equal(chunked(np.int64(2)), chunked(2))


@pytest.mark.parametrize("far", [2**31 - 1, 2**40])
def test_a_window_beyond_every_position_keeps_everything(packed, far):
    np.testing.assert_array_equal(packed.apply_sliding_window(far).attention_mask, mask_of(packed))
    np.testing.assert_array_equal(packed.apply_chunked(far).attention_mask, mask_of(packed))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint32, np.int8])
def test_positions_of_any_integer_dtype_may_be_moved_below_0(dtype):
    info = MaskInfo.from_segments(np.zeros((1, 4), int), q_positions=np.arange(4, dtype=dtype)[None])
    expected = np.arange(4)[None, :] <= np.arange(4)[:, None] - 2
    np.testing.assert_array_equal(info.apply_causal(-2).attention_mask[0, 0], expected)
    np.testing.assert_array_equal(info.apply_sliding_window((200, 0), -2).attention_mask[0, 0], expected)
    assert all(jnp.issubdtype(positions.dtype, jnp.signedinteger) for positions in info.compared_positions())


@pytest.mark.parametrize("dtype", [np.uint8, np.uint32])
def test_segments_without_a_sign_get_padding(dtype):
    info = MaskInfo.from_segments(np.array([[0, 0, 1, 1]], dtype)).apply_kv_lengths(np.array([3]))
    assert info.kv_segment_ids.tolist() == [[0, 0, 1, -1]]
    assert jnp.issubdtype(info.q_segment_ids.dtype, jnp.signedinteger)


STRICT = {
    "dtypes": lambda: jax.numpy_dtype_promotion("strict"),
    "ranks": lambda: jax.numpy_rank_promotion("raise"),
    "x64": lambda: jax.enable_x64(True),
}


@pytest.mark.parametrize("setting", STRICT)
@pytest.mark.slow
def test_strict_settings(setting):
    def restricted():
        info = MaskInfo.from_segments(jnp.asarray(IDS))
        return mask_of(info.apply_causal(ROWS[:2]).apply_sliding_window(1).apply_chunked(2).apply_kv_lengths(np.array([3, 5])))

    expected = restricted()
    with STRICT[setting]():
        np.testing.assert_array_equal(restricted(), expected)
        packed = MaskInfo.from_cu_seqlens(np.array([0, 3, 7]), np.int64(9)).apply_causal()
        MaskInfo.from_attention_mask(MaskInfo.from_segments(IDS).get_or_compute_attention_mask()).get_or_compute_segment_ids()
    assert packed.attention_mask.sum() == 6 + 10


def test_positions_decide_when_they_are_given():
    info = MaskInfo.from_attention_mask(np.ones((1, 1, 2, 5), bool)).replace(q_positions=jnp.array([[3, 4]]))
    np.testing.assert_array_equal(info.apply_causal().attention_mask[0, 0], [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])


def test_apply_token_type_ids(packed):
    types = np.array([[1, 1, 1, 0, 0, 1], [0, 0, 3, 3, 3, 0]])
    same = types[:, None, :, None] == types[:, None, None, :]
    causal = packed.apply_causal()
    # Across the two segments of a row, and with padding, nothing is added.
    added = same & (types != 0)[:, None, :, None] & mask_of(packed)
    np.testing.assert_array_equal(causal.apply_token_type_ids(types).attention_mask, mask_of(causal) | added)
    only = causal.apply_token_type_ids(types, combine="intersection")
    np.testing.assert_array_equal(only.attention_mask, mask_of(causal) & same)
    plain = MaskInfo.from_attention_mask(np.zeros((2, 1, 6, 2), bool)).apply_token_type_ids((types, types[:, :2]))
    np.testing.assert_array_equal(plain.attention_mask, (same & (types != 0)[:, None, :, None])[..., :2])


def test_apply_kv_lengths(packed, pairs):
    filled = np.arange(6) < np.array([[3], [5]])
    shorter = packed.apply_kv_lengths(jnp.array([3, 5]))
    assert shorter.attention_mask is None  # segments can say it
    np.testing.assert_array_equal(mask_of(shorter), mask_of(packed) & filled[:, None, None, :])
    got = MaskInfo.from_attention_mask(pairs).apply_kv_lengths(np.array([1, 4])).attention_mask
    np.testing.assert_array_equal(got, pairs & (np.arange(5) < np.array([[1], [4]]))[:, None, None, :])


def test_and_or_not(packed):
    causal = MaskInfo.from_attention_mask(np.tril(np.ones((2, 6, 6), bool)))
    np.testing.assert_array_equal(mask_of(packed & causal), mask_of(packed) & mask_of(causal))
    np.testing.assert_array_equal(mask_of(packed | causal), mask_of(packed) | mask_of(causal))
    np.testing.assert_array_equal(mask_of(~packed), ~mask_of(packed))
    assert (packed | causal).q_segment_ids is None


def test_is_a_frozen_pytree(packed):
    with pytest.raises(AttributeError):
        packed.q_segment_ids = None
    jitted = jax.jit(lambda info: info.apply_causal().apply_kv_lengths(jnp.array([4, 4])))(packed)
    np.testing.assert_array_equal(mask_of(jitted), mask_of(packed.apply_causal().apply_kv_lengths(jnp.array([4, 4]))))
    stacked = jax.tree.map(lambda x: jnp.stack([x, x]), packed)
    mapped = jax.vmap(lambda info: info.apply_sliding_window(1).attention_mask)(stacked)
    np.testing.assert_array_equal(mapped[1], packed.apply_sliding_window(1).attention_mask)


def test_visualize(packed, capsys):
    packed.apply_causal().visualize(batch=1)
    rows = capsys.readouterr().out.splitlines()
    drawn = [[cell == "█" for cell in row.split(" ")] for row in rows]
    np.testing.assert_array_equal(drawn, mask_of(packed.apply_causal())[1, 0])
    packed.visualize(limit=3)
    assert capsys.readouterr().out.splitlines() == ["█ · ·", "· █ ▒", "· ▒ ▒"]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: MaskInfo.from_attention_mask(np.ones(3, bool)), ValueError, r"mask must be \[B, K\]"),
        (lambda: MaskInfo.from_attention_mask(np.ones((2, 3))), TypeError, "A float mask is a bias"),
        (lambda: MaskInfo.from_segments(np.ones((2, 3))), TypeError, "q_segment_ids must be integers"),
        (lambda: MaskInfo.from_segments(IDS, IDS[:1]), ValueError, "kv_segment_ids must have q_segment_ids' batch 2"),
        (lambda: MaskInfo.from_segments(IDS, q_positions=IDS[:, :2]), ValueError, r"q_positions must be \[2, 6\]"),
        (lambda: MaskInfo.from_cu_seqlens(np.ones((2, 2), int)), ValueError, r"cu_seqlens must be integers \[N\+1\]"),
        (lambda: MaskInfo.from_cu_seqlens([1, 3]), ValueError, "cu_seqlens must start at 0; got 1 first"),
        (
            lambda: MaskInfo.from_cu_seqlens(np.array([0, 4, 3], np.uint8)),
            ValueError,
            "not decrease; got 4 before 3 at index 2",
        ),
        (lambda: MaskInfo.from_cu_seqlens([0, 5], 4), ValueError, "cu_seqlens must not exceed total, 4; got 5 last"),
        (lambda: MaskInfo.from_cu_seqlens([0, [1, 2]]), TypeError, r"cu_seqlens must be an array; got \[0, \[1, 2\]\]"),
        (lambda: MaskInfo.from_cu_seqlens([0, 5], -1), ValueError, "total must be at least 0; got -1"),
        (lambda: MaskInfo.from_cu_seqlens([0, 5], 5.0), TypeError, "total must be an int; got 5.0"),
        (lambda: MaskInfo.from_segments(IDS).apply_causal(np.ones(6, int)), ValueError, r"offset must be a number or \[2\]"),
        (lambda: MaskInfo.from_segments(IDS).apply_causal(np.ones((2, 1), int)), ValueError, r"got shape \[2, 1\]"),
        (lambda: MaskInfo.from_segments(IDS).apply_chunked(2, [1]), ValueError, r"offset .* got shape \[1\]"),
        (lambda: MaskInfo.from_segments(IDS).apply_causal(1.5), TypeError, "offset must be an int or integers"),
        (lambda: MaskInfo.from_segments(IDS).apply_causal(True), TypeError, "offset must be an int or integers"),
        (lambda: MaskInfo.from_segments(IDS).apply_causal(2**40), TypeError, "offset must be an array; got 1099511627776"),
        (lambda: MaskInfo.from_segments(IDS).apply_sliding_window(np.ones(2, int)), TypeError, r"window .* got int64\[2\]"),
        (lambda: MaskInfo.from_segments(IDS).apply_sliding_window((1, 2.0)), TypeError, "window must be an int .* got 2.0"),
        (lambda: MaskInfo.from_segments(IDS).apply_chunked(True), TypeError, "chunk_size must be an int .* got True"),
        (lambda: MaskInfo.from_segments(IDS).apply_chunked(np.int8(0)), ValueError, "chunk_size must be at least 1; got 0"),
        (
            lambda: jax.jit(MaskInfo.from_segments(IDS).apply_chunked)(jnp.ones(2, int)),
            TypeError,
            r"chunk_size .* got int32\[2\]",
        ),
        (lambda: MaskInfo.from_segments(IDS).apply_kv_lengths(np.ones(2)), TypeError, "lengths must be integers; got float32"),
        (lambda: MaskInfo.from_segments(IDS).apply_token_type_ids((IDS,) * 3), ValueError, "got a tuple of 3"),
        (lambda: MaskInfo.from_segments(IDS) & MaskInfo.from_segments(IDS[:, :1]), ValueError, "masks that are combined"),
        (lambda: MaskInfo.from_segments(IDS) | MaskInfo.from_segments(IDS[:, :5]), ValueError, "masks that are combined"),
        (lambda: MaskInfo.from_segments(IDS).replace(q_positions=np.ones((2, 6))), TypeError, "q_positions must be integers"),
        (lambda: MaskInfo().replace(attention_mask=np.ones((2, 3), bool)), ValueError, r"attention_mask must be bool \[B"),
        (lambda: MaskInfo().replace(positions=IDS), TypeError, "positions"),
        (lambda: MaskInfo().shape, ValueError, "neither attention_mask nor both"),
        (lambda: MaskInfo.from_segments(IDS).apply_sliding_window(-1), ValueError, "window must not be negative"),
        (lambda: MaskInfo.from_segments(IDS).apply_sliding_window((1, 2, 3)), TypeError, "window must be an int or a pair"),
        (lambda: MaskInfo.from_segments(IDS).apply_chunked(0), ValueError, "chunk_size must be at least 1"),
        (lambda: MaskInfo.from_segments(IDS).apply_kv_lengths(np.array([1])), ValueError, r"lengths must be \[2\]"),
        (lambda: MaskInfo.from_segments(IDS).apply_token_type_ids(IDS, "xor"), ValueError, "combine must be 'union'"),
        (lambda: MaskInfo.from_segments(IDS).apply_token_type_ids(IDS[:, :3]), ValueError, r"ids must be \[2, 6\]"),
        (lambda: mask_to_segment_ids(np.ones((2, 2), bool)), ValueError, r"mask must be \[B, H, Q, K\]"),
        (lambda: MaskInfo.from_segments(IDS).visualize(limit=0), ValueError, "limit must be at least 1"),
    ],
)
def test_errors_name_the_argument(call, error, message):
    with pytest.raises(error, match=message):
        call()
