"""Masks of softmax attention on Triton: which are packed into bits, what the bits say, which tiles they leave out."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")

from ejkernel._device import device_of
from ejkernel.kernels._attention import AttentionProblem
from ejkernel.kernels._triton import attention
from ejkernel.kernels._triton.attention import _plan
from ejkernel.kernels._triton.attention._masks import Masks
from ejkernel.kernels._triton.attention._plan import Kernels, Plan, Tiles
from ejkernel.kernels._triton.attention._platform import HEURISTIC
from ejkernel.testing.attention_cases import AttentionCase
from ejkernel.testing.compare import relative_rms
from ejkernel.types.mask import MaskInfo

pytestmark = [pytest.mark.gpu] if device_of(()).backend == "gpu" else []
NAMES = ("mask", "q_segment_ids", "kv_segment_ids", "q_positions", "kv_positions")
KINDS: dict[str, dict[str, Any]] = {
    "mask": {},
    "of heads": {"heads": 2},
    "shared": {"batch": 1},
    "causal": {"sliding_window": (70, 0)},
    "shared, packed documents": {"batch": 1, "packed": True, "sliding_window": (9, 4)},
    "queries past the keys": {"T": 300, "S": 33, "causal": True},
    "keys past the queries": {"T": 20, "S": 270},
}


def masked(kind, B=2, T=60, S=60, heads=1, batch=2, packed=False, **options):
    """(what masks the call, which queries attend to which keys `[b, heads, T, S]`)."""
    T, S = (KINDS[kind].get(name, length) for name, length in (("T", T), ("S", S)))
    rng = np.random.default_rng(0)
    mask = rng.random((batch, heads, T, S)) < 0.9
    keep, info = mask, None
    distance = np.arange(S)[None, :] - np.arange(T)[:, None]
    if packed:
        ids = np.stack([np.repeat([0, 1, 2, -1], (5 + n, 31, 18, 6 - n)) for n in range(B)]).astype(np.int32)
        info = MaskInfo.from_segments(jnp.asarray(ids))
        keep = keep & np.asarray(info.get_or_compute_attention_mask())
        q, k = (np.asarray(x) for x in info.get_or_compute_positions())
        distance = (k[:, None, :] - q[:, :, None])[:, None]
    left, right = options.get("sliding_window", (None, 0 if options.get("causal") else None))
    keep = keep if left is None else keep & (distance >= -left)
    keep = keep if right is None else keep & (distance <= right)
    query, key = jnp.zeros((B, T, 2, 8)), jnp.zeros((B, S, 2, 8))
    problem = AttentionProblem.from_arguments(query, key, key, mask_info=info, attention_mask=jnp.asarray(mask), **options)
    others = {name: x for name in NAMES if (x := getattr(problem, name)) is not None}
    arrays = {"query": query, "key": key, "value": key}
    return Masks.of(Plan.of(problem, HEURISTIC), arrays, others, of_keys=True), keep


def unpacked(bits):
    """`[..., words]` as `[..., 32 * words]`."""
    return ((np.asarray(bits)[..., None] >> np.arange(32)) & 1).astype(bool).reshape(*bits.shape[:-1], -1)


@pytest.mark.parametrize("kind", KINDS)
def test_bits_say_who_attends_to_whom(kind):
    masks, keep = masked(kind, **{name: x for name, x in KINDS[kind].items() if name not in "TS"})
    assert masks.call.PACKED
    by_query, by_key = unpacked(masks.operands["mask"]), unpacked(masks.bits_of_keys)
    np.testing.assert_array_equal(by_query[..., : keep.shape[3]], keep)
    np.testing.assert_array_equal(by_key[..., : keep.shape[2]], keep.swapaxes(2, 3))
    assert not by_query[..., keep.shape[3] :].any()
    assert not by_key[..., keep.shape[2] :].any()


@pytest.mark.parametrize("of_keys", [False, True], ids=["queries", "keys"])
@pytest.mark.parametrize("blocks", [(8, 16), (32, 64)], ids=str)
def test_tiles_that_bits_leave_out_see_nothing(blocks, of_keys):
    """And those that go without a mask see everything."""
    rng = np.random.default_rng(1)
    keep = np.tril(np.ones((200, 150), bool), 20) & (rng.random((200, 150)) < 0.9997)
    keep[:, 130:] = False
    q, k = jnp.zeros((1, 200, 1, 8)), jnp.zeros((1, 150, 1, 8))
    problem = AttentionProblem.from_arguments(q, k, k, attention_mask=jnp.asarray(keep[None, None]))
    arrays = {"query": q, "key": k, "value": k}
    masks = Masks.of(Plan.of(problem, HEURISTIC), arrays, {"mask": problem.mask}, of_keys=False)
    table = np.asarray(masks.ranges(blocks, of_keys=of_keys))[0, 0]
    if of_keys:
        keep, blocks = keep.T, blocks[::-1]
    for n, (first, full_first, full_last, last) in enumerate(table):
        rows = keep[n * blocks[0] : (n + 1) * blocks[0]]
        seen = np.zeros(keep.shape[1], bool)
        seen[first * blocks[1] : last * blocks[1]] = True
        assert not rows[:, ~seen].any()
        assert rows[:, full_first * blocks[1] : full_last * blocks[1]].all()
        assert first <= full_first <= full_last <= last
    assert (table[:, 2] > table[:, 1]).any()
    assert (table[:, 3] - table[:, 0] < -(-keep.shape[1] // blocks[1])).any()


def test_masks_that_stay_as_they_are():
    """One row or one column of a mask is little to read, and decoding reads a mask once."""
    k = jnp.zeros((1, 40, 1, 8))
    for T, shape in ((40, (1, 1, 1, 40)), (40, (1, 1, 40, 1)), (4, (1, 1, 4, 40))):
        q = jnp.zeros((1, T, 1, 8))
        problem = AttentionProblem.from_arguments(q, k, k, attention_mask=jnp.ones(shape, bool))
        masks = Masks.of(Plan.of(problem, HEURISTIC), {"query": q, "key": k, "value": k}, {"mask": problem.mask}, of_keys=True)
        assert not masks.call.PACKED
        assert masks.operands["mask"] is problem.mask


CASES = (
    AttentionCase("heads", mask=4, window=(20, 3), bias=(1, 1, "T", "S"), q_len=70, kv_len=61, batch=1, heads=4, kv_heads=2),
    AttentionCase("packed", mask=1, segments="packed", causal=True, bias=("B", 1, 1, "S"), q_len=64, kv_len=64, heads=2),
)


@pytest.mark.long
@pytest.mark.parametrize("blocks", [(16, 16), (32, 64)], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_packed_masks_in_many_tiles(case, blocks, monkeypatch):
    for tiles in (_plan.SINGLE, _plan.HALF):
        monkeypatch.setitem(tiles, 64, Kernels(*[Tiles(blocks[0], blocks[1], 4, 1)] * 4))
    case.check(attention, weights=False)


@pytest.mark.skipif(device_of(()).backend != "gpu", reason="needs an H200's memory")
@pytest.mark.parametrize("plane", ["mask", "bias"])
def test_planes_of_more_than_two_to_the_31_elements(plane):
    """The last row of the batch, or the last head with its bias's gradient, of a call against a call on it alone."""
    T, D, many = 12288, 64, 16  # 16 * 12288 * 12288 > 2^31
    keys = jax.random.split(jax.random.key(0), 5)
    shape = (many, T, 1, D) if plane == "mask" else (1, T, many, D)
    q, k, v, do = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys[:4])
    own = (many, 1, T, T) if plane == "mask" else (1, many, T, T)
    given = jax.random.bernoulli(keys[4], 0.9, own) if plane == "mask" else jax.random.normal(keys[4], own, jnp.bfloat16)

    @jax.jit
    def both(q, k, v, given, do):
        masked = {"attention_mask": given} if plane == "mask" else {}
        biased = {"bias": given} if plane == "bias" else {}
        run = lambda q, k, v, biased: attention(q, k, v, **biased, **masked, causal=True, dtype=None, return_weights=False)[0]
        output, pull = jax.vjp(run, q, k, v, biased)
        return output, pull(do)

    axis = 0 if plane == "mask" else 2
    last = lambda x, axis: jax.lax.slice_in_dim(x, many - 1, many, axis=axis)
    output, (dq, dk, dv, dbias) = both(q, k, v, given, do)
    got = {"output": output, "query": dq, "key": dk, "value": dv}
    got = {name: np.asarray(last(x, axis).astype(jnp.float32)) for name, x in got.items()}
    if plane == "bias":
        got["bias"] = np.asarray(last(dbias["bias"], 1).astype(jnp.float32))
    alone = both(*(last(x, axis) for x in (q, k, v)), last(given, 0 if plane == "mask" else 1), last(do, axis))
    output, (dq, dk, dv, dbias) = alone
    want = {"output": output, "query": dq, "key": dk, "value": dv, **dbias}
    for name, x in want.items():
        assert relative_rms(got[name], np.asarray(x.astype(jnp.float32))) < 1e-2, name
