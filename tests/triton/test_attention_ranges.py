"""Which tiles a call with segments visits: all that see something, and of packed documents no others."""

import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")

from ejkernel._device import device_of
from ejkernel.kernels._attention import AttentionProblem
from ejkernel.kernels._triton import attention
from ejkernel.kernels._triton.attention import _plan
from ejkernel.kernels._triton.attention._plan import Kernels, Tiles
from ejkernel.kernels._triton.attention._ranges import tile_ranges
from ejkernel.testing.attention_cases import AttentionCase
from ejkernel.types.mask import MaskInfo

pytestmark = [pytest.mark.gpu] if device_of(()).backend == "gpu" else []
NAMES = ("q_segment_ids", "kv_segment_ids", "q_positions", "kv_positions")
BOUNDS = {"causal": (None, 0), "window": (9, 0), "both ways": (5, 3), "all": (None, None)}
TABLES = [(blocks, of_keys) for blocks in ((8, 8), (4, 8), (16, 4)) for of_keys in (False, True)]


def packed(*lengths: int, total: int) -> MaskInfo:
    return MaskInfo.from_cu_seqlens(jnp.asarray(np.cumsum([0, *lengths]), jnp.int32), total=total)


def segments(q, kv=None, **positions) -> MaskInfo:
    of = lambda x: None if x is None else jnp.asarray(np.asarray(x, np.int32)[None])
    return MaskInfo.from_segments(of(q), of(kv), **{name: of(x) for name, x in positions.items()})


DOCUMENTS = {
    "uneven": packed(3, 41, 20, 30, 6, 28, total=128),
    "shorter than a tile": packed(*[5] * 25, total=125),
    "on tiles": packed(16, 32, 48, 32, total=128),
    "empty ones, padding": packed(0, 30, 0, 0, 50, 2, 0, total=100),
    "one": packed(70, total=70),
    "padding alone": packed(0, total=40),
    "padding in front": segments([-1] * 11 + [0] * 40 + [1] * 49),
}
RNG = np.random.default_rng(0)
OTHERS = {
    "unsorted": segments(np.repeat([4, 0, 7, -1, 2, 0], [20, 9, 31, 5, 25, 10])),
    "mixed": segments(RNG.integers(-1, 3, 100)),
    "keys of others": segments(np.repeat([0, 1, 3], [30, 45, 5]), np.repeat([0, 1, 2, 3, -1], [17, 50, 21, 9, 3])),
    "keys unsorted": segments(np.repeat([0, 1, 3], [30, 45, 5]), np.repeat([3, -1, 1, 0], [17, 10, 50, 20])),
    "own positions": segments(np.repeat([0, 1], [40, 37]), q_positions=RNG.permutation(77)),
    "positions far apart": segments(np.repeat([0, 1], [40, 37]), q_positions=np.arange(77) * 2**22 - 2**27),
}


def attending(info: MaskInfo, left: int | None, right: int | None) -> np.ndarray:
    """Which queries attend to which keys, `[T, S]`."""
    keep = np.asarray(info.get_or_compute_attention_mask())[0, 0]
    q, k = (np.asarray(x)[0].astype(np.int64) for x in info.get_or_compute_positions())
    distance = k[None, :] - q[:, None]
    keep = keep if left is None else keep & (distance >= -left)
    return keep if right is None else keep & (distance <= right)


def table_of(info: MaskInfo, bounds: str, blocks: tuple[int, int], of_keys: bool) -> tuple[np.ndarray, np.ndarray]:
    """(ranges of every tile, for each the tiles that it sees something of), both by keys where `of_keys`."""
    left, right = BOUNDS[bounds]
    T, S = info.q_len, info.kv_len
    problem = AttentionProblem.from_arguments(
        jnp.zeros((1, T, 1, 8)), *[jnp.zeros((1, S, 1, 8))] * 2, mask_info=info, causal=(left, right) == (None, 0),
        sliding_window=None if left is None else (left, right),
    )  # fmt: skip
    assert (problem.left, problem.right) == (left, right)
    others = {name: x for name in NAMES if (x := getattr(problem, name)) is not None}
    table = np.asarray(tile_ranges(others, left, right, (T, S), blocks, of_keys=of_keys))[0, 0]
    keep = attending(info, left, right)
    if of_keys:
        keep, blocks = keep.T, blocks[::-1]
    for n, (first, full_first, full_last, last) in enumerate(table):
        rows = keep[n * blocks[0] : (n + 1) * blocks[0]]
        assert first <= full_first <= full_last <= last
        assert not rows[:, : first * blocks[1]].any()
        assert not rows[:, last * blocks[1] :].any()
        assert rows[:, full_first * blocks[1] : full_last * blocks[1]].all()
    whole = np.pad(keep, [(0, -length % block) for length, block in zip(keep.shape, blocks, strict=True)])
    seen = whole.reshape(len(table), blocks[0], -1, blocks[1]).any((1, 3))
    return table, seen


@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("kind", [*DOCUMENTS, *OTHERS])
def test_tiles_that_are_left_out_see_nothing(kind, bounds):
    """And those that go without a mask see everything."""
    for blocks, of_keys in TABLES:
        table_of((DOCUMENTS | OTHERS)[kind], bounds, blocks, of_keys)


@pytest.mark.parametrize("kind", [kind for kind in DOCUMENTS if kind != "shorter than a tile"])
def test_documents_visit_no_tile_too_many(kind):
    """The tile where a document ends begins the next one, at position 0: that is not in reach of the document's queries."""
    for blocks, of_keys in TABLES:
        table, seen = table_of(DOCUMENTS[kind], "causal", blocks, of_keys)
        np.testing.assert_array_equal(table[:, 3] - table[:, 0], seen.sum(1))


@pytest.mark.parametrize("kind", ["uneven", "empty ones, padding", "keys of others", "unsorted", "own positions"])
def test_values_and_gradients(kind, monkeypatch):
    """In tiles so small that documents have several."""
    for tiles in (_plan.SINGLE, _plan.HALF):
        monkeypatch.setitem(tiles, 64, Kernels(*[Tiles(16, 16, 4, 1)] * 4))
    info = (DOCUMENTS | OTHERS)[kind]
    case = AttentionCase(kind, batch=1, heads=2, kv_heads=1, q_len=info.q_len, kv_len=info.kv_len, causal=True)
    vars(case)["mask_info"] = info  # instead of those that a case makes itself
    case.check(attention, weights=False)
