"""Softmax attention on the triton platform over the cases that all platforms share: interpreted here, compiled on a GPU."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")

from ejkernel._device import Device, device_of, on_device
from ejkernel.kernels._attention import AttentionConfig, AttentionProblem
from ejkernel.kernels._triton import attention
from ejkernel.kernels._triton.attention import _plan
from ejkernel.kernels._triton.attention._plan import DECODED_QUERIES, Kernels, Plan, Tiles
from ejkernel.kernels._triton.attention._platform import HEURISTIC, TritonAttention
from ejkernel.kernels._triton.attention._ranges import tile_ranges
from ejkernel.kernels._xla import attention as on_xla
from ejkernel.testing.attention_cases import CASES, AttentionCase
from ejkernel.testing.compare import ATTENTION_TOLERANCES, assert_close, relative_rms
from ejkernel.types.mask import MaskInfo

ON_GPU = device_of(()).backend == "gpu"
pytestmark = [pytest.mark.gpu] if ON_GPU else []
TRITON = TritonAttention()
# What an interpreter needs minutes for is left to the GPU: one case of each kind here, all of them there.
INTERPRETED = (
    "causal", "causal-more-queries", "multi-query", "one-query", "other-value-channels", "window", "window-past-the-keys",
    "mask-keys", "mask-kv-heads", "bias-kv-heads", "bias-keys", "bias-queries", "sinks-heads", "soft-cap", "dropout-everything",
    "packed-causal", "decode", "extreme", "bfloat16-sinks", "float16",
    "bfloat16-64-channels", "bfloat16-128-channels-one-query",
)  # fmt: skip
# Small tiles make few tokens many tiles: those that are skipped, seen in part and seen wholly are all there.
SMALL = Kernels(*[Tiles(16, 16, 4, 1)] * 4)
IN_TILES = (
    AttentionCase("causal", causal=True, q_len=53, kv_len=53, batch=1, heads=2, kv_heads=1),
    AttentionCase("window", window=(20, 3), bias=(1, 1, "T", "S"), q_len=70, kv_len=61, batch=1, heads=2, kv_heads=1),
    AttentionCase("masks", mask=2, causal=True, q_len=40, kv_len=70, batch=2, heads=2, kv_heads=2, sinks=(1,)),
    AttentionCase("segments", segments="packed", causal=True, soft_cap=2.0, q_len=64, kv_len=64, heads=2, dropout=0.2),
)
WIDE = [
    AttentionCase(f"wide-{name}-{D}x{V}", dtype=dtype, q_len=300, kv_len=333, channels=D, value_channels=V, **options)
    for D, V in ((64, 64), (128, 128), (100, 36), (192, 128), (256, 256))
    for dtype, name, options in (
        ("bfloat16", "causal", {"causal": True}),
        ("bfloat16", "cap", {"causal": True, "soft_cap": 30.0, "size": 8.0, "sinks": ("H", 1)}),
        ("float16", "window", {"window": (70, 20), "mask": 1}),
        ("bfloat16", "bias", {"bias": (1, "H", "T", "S"), "dropout": 0.1}),
        ("float32", "float32", {"causal": True, "soft_cap": 20.0}),
    )
]


def check(case: AttentionCase, **options: Any) -> None:
    case.check(functools.partial(attention, **options), weights=False)


def _cases() -> list[AttentionCase]:
    return [*CASES, *WIDE] if ON_GPU else [case for case in CASES if case.name in INTERPRETED]


@pytest.mark.parametrize("case", _cases(), ids=str)
def test_matches_reference(case):
    check(case)


def test_interpreted_cases_exist():
    assert set(INTERPRETED) <= {case.name for case in CASES}


@pytest.mark.parametrize("case", IN_TILES, ids=str)
def test_many_tiles(case, monkeypatch):
    for tiles in (_plan.SINGLE, _plan.HALF):
        monkeypatch.setitem(tiles, 64, SMALL)
    check(case)


def test_large_scores_keep_their_digits():
    """Scores near 1e5 that float32 holds exactly: in base 2 their rounding would move weights by 1e-5."""
    (case,) = (case for case in CASES if case.name == "extreme")
    got, want = case.value_and_gradients(attention, weights=False), case.expected()
    assert_close(got, {name: want[name] for name in got}, (2e-6, 5e-6))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_scores_up_to_the_cap(dtype):
    """Where an approximate tanh would cost weights a percent each."""
    case = AttentionCase("cap", q_len=24, kv_len=40, batch=1, heads=2, kv_heads=1, soft_cap=30.0, size=60.0, dtype=dtype)
    q, k = (np.asarray(case.arrays[name], np.float32) for name in ("query", "key"))
    scores = np.einsum("bthd,bsd->bhts", q, k[:, :, 0])
    assert (np.abs(scores / 4) > 2 * case.soft_cap).mean() > 0.1
    check(case)


@pytest.mark.parametrize("soft_cap", [1e6, 1e20, 3.4e38])
def test_a_cap_far_above_the_scores_changes_nothing(soft_cap):
    """Where the difference of two numbers of the cap's size would leave none of their digits."""
    check(AttentionCase("no cap", q_len=24, kv_len=40, batch=1, heads=2, kv_heads=1, soft_cap=soft_cap, dtype="bfloat16"))


def test_a_traced_scale_has_its_gradient():
    case = AttentionCase("scale", batch=1, heads=2, kv_heads=1, causal=True)
    (q, k, v), d_output = (case.arrays[name] for name in ("query", "key", "value")), case.d_output

    @functools.partial(jax.jit, static_argnums=0)
    def gradients(platform, scale, q):
        run = functools.partial(platform, causal=True, dtype=None, return_weights=False)
        return jax.grad(lambda scale, q: (run(q, k, v, softmax_scale=scale)[0] * d_output).sum(), (0, 1))(scale, q)

    for scale in (0.3, -0.2, 0.0):
        got, want = (gradients(platform, jnp.float32(scale), q) for platform in (attention, on_xla))
        np.testing.assert_allclose(got[0], want[0], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(got[1], want[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("q_len", "groups"), [(1, 1), (3, 4), (DECODED_QUERIES, 2)])
def test_decoding_splits_the_keys(q_len, groups):
    case = AttentionCase(
        "decode", batch=2, q_len=q_len, kv_len=700, heads=2 * groups, segments="decode", sinks=(1,), mask="keys"
    )
    assert Plan.of(case.problem, HEURISTIC).parts > 1
    check(case)


@pytest.mark.parametrize("bias", [None, (1, "H", "T", "S")], ids=["plain", "shared bias"])
def test_heads_that_go_together_need_not_divide_all(bias):
    """20 of them, of which 16 are computed at one time, in several tiles."""
    case = AttentionCase("heads", batch=5, q_len=80, kv_len=70, heads=4, kv_heads=4, causal=True, bias=bias)
    together, heads = Plan.of(case.problem, HEURISTIC).together, case.batch * case.heads
    assert together < heads
    assert heads % together
    check(case)


def test_decoding_with_a_part_that_sees_nothing():
    case = AttentionCase("decode", batch=1, q_len=2, kv_len=520, heads=2, causal=True)  # only the first two keys are seen
    check(case)


def _attending(info: MaskInfo | None, mask: Any, left: int | None, right: int | None, T: int, S: int) -> np.ndarray:
    """Which queries attend to which keys, `[1, 1, T, S]`."""
    keep = np.ones((1, 1, T, S), bool) if mask is None else np.broadcast_to(np.asarray(mask), (1, 1, T, S)).copy()
    q, k = np.arange(T)[None], np.arange(S)[None]
    if info is not None:
        keep = keep & np.asarray(info.get_or_compute_attention_mask())
        q, k = (np.asarray(x) for x in info.get_or_compute_positions())
    distance = k[:, None, None, :] - q[:, None, :, None]
    keep = keep & (distance >= -left) if left is not None else keep
    return keep & (distance <= right) if right is not None else keep


@pytest.mark.parametrize("of_keys", [False, True], ids=["queries", "keys"])
@pytest.mark.parametrize("kind", ["packed", "mask", "packed and mask"])
def test_tiles_that_are_left_out_see_nothing(kind, of_keys):
    """And those that go without a mask see everything."""
    T, S, left, right, blocks = 50, 50, 25, 0, (8, 4)
    ids = np.repeat(np.array([[0, 1, 2, -1]], np.int32), (5, 31, 10, 4), axis=1)
    info = MaskInfo.from_segments(jnp.asarray(ids)) if "packed" in kind else None
    mask = jnp.asarray(np.random.default_rng(0).random((1, 1, T, S)) < 0.98) if "mask" in kind else None
    keep = _attending(info, mask, left, right, T, S)[0, 0]
    problem = AttentionProblem.from_arguments(
        *[jnp.zeros((1, T, 1, 8))] * 3, mask_info=info, attention_mask=mask, sliding_window=(left, right)
    )
    names = ("mask", "q_segment_ids", "kv_segment_ids", "q_positions", "kv_positions")
    others = {name: x for name in names if (x := getattr(problem, name)) is not None}
    table = np.asarray(tile_ranges(others, problem.left, problem.right, (T, S), blocks, of_keys=of_keys))[0, 0]
    if of_keys:
        keep, blocks = keep.T, blocks[::-1]
    skipped = 0
    for n, (first, full_first, full_last, last) in enumerate(table):
        rows = keep[n * blocks[0] : (n + 1) * blocks[0]]
        seen = np.zeros(keep.shape[1], bool)
        seen[first * blocks[1] : last * blocks[1]] = True
        assert not rows[:, ~seen].any()
        assert rows[:, full_first * blocks[1] : full_last * blocks[1]].all()
        assert first <= full_first <= full_last <= last
        assert full_last * blocks[1] <= keep.shape[1] or full_first == full_last
        skipped += (~seen).sum()
    assert skipped > 0
    assert (table[:, 2] > table[:, 1]).any()


def test_what_is_refused_says_why():
    q = jnp.ones((1, 4, 1, 8))
    for options, why in (
        ({"softmax_dtype": jnp.bfloat16}, "softmax of Triton kernels is in float32, not bfloat16"),
        ({"cfg": AttentionConfig("direct")}, "only schedule 'flash', not 'direct'"),
        ({"cfg": AttentionConfig("flash", block_q=24)}, "block_q must be None or one of 16, 32"),
        ({"cfg": AttentionConfig("flash", num_warps=3)}, "num_warps must be None or one of 1, 2, 4"),
    ):
        with pytest.raises(ValueError, match=why):
            attention(q, q, q, **options)
    with pytest.raises(ValueError, match="channels of keys and values go up to 256; got 300 and 8"):
        attention(jnp.ones((1, 4, 1, 300)), jnp.ones((1, 4, 1, 300)), q)
    with pytest.raises(ValueError, match="num_warps must be None with schedule 'direct'"):
        AttentionConfig("direct", num_warps=4)


def test_derivatives_that_there_are_not():
    q = jnp.ones((1, 4, 1, 8))
    run = lambda q: attention(q, q, q, return_weights=False, dtype=None)[0].sum()
    with pytest.raises(TypeError, match="platform='xla'"):
        jax.jvp(run, (q,), (q,))
    with pytest.raises(TypeError, match="gradient of a gradient"):
        jax.grad(lambda q: jax.grad(run)(q).sum())(q)


def test_vmap_is_a_loop():
    case = AttentionCase("mapped", batch=1, q_len=20, kv_len=20, heads=2, kv_heads=1, causal=True, bias=(1, 1, "T", "S"))
    arrays = case.arrays
    values = jnp.stack([arrays["value"], -arrays["value"]])
    loss = lambda v: (attention(**{**arrays, "value": v}, causal=True, dtype=None, return_weights=False)[0] ** 2).sum()
    one_by_one = np.stack([np.asarray(jax.grad(loss)(v)) for v in values])
    assert relative_rms(jax.vmap(jax.grad(loss))(values), one_by_one) < ATTENTION_TOLERANCES["float32"][0]


SETTINGS = {
    "x64": functools.partial(jax.enable_x64, True),
    "strict dtypes": functools.partial(jax.numpy_dtype_promotion, "strict"),
    "no rank promotion": functools.partial(jax.numpy_rank_promotion, "raise"),
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_settings_of_jax_change_nothing(setting):
    case = AttentionCase("settings", batch=1, heads=2, kv_heads=1, segments="packed", causal=True, mask=1, sinks=(1,))
    want = case.expected()  # before the setting, which the reference may not bear
    arrays, options, d_output = case.arrays, case.options, case.d_output
    with SETTINGS[setting]():
        output, pull = jax.vjp(lambda arrays: attention(**arrays, **options, return_weights=False)[0], arrays)
        got = {"output": output, **pull(d_output)[0]}
    assert_close({name: np.asarray(x) for name, x in got.items()}, {name: want[name] for name in got}, case.tolerance)


def test_nothing_to_attend_to():
    q, none = jnp.ones((1, 3, 2, 8)), jnp.ones((1, 0, 1, 8))
    np.testing.assert_array_equal(attention(q, none, none, dtype=None, return_weights=False)[0], 0)
    assert attention(q[:, :0], q, q, dtype=None, return_weights=False)[0].shape == (1, 0, 2, 8)


def test_a_named_configuration_is_followed():
    case = AttentionCase("named", batch=1, heads=1, kv_heads=1, causal=True)
    cfg = AttentionConfig("flash", block_q=16, block_k=32, num_warps=4, num_stages=1)
    assert Plan.of(case.problem, cfg).forward == Tiles(16, 32, 4, 1)
    check(case, cfg=cfg)
    assert TRITON.route(case.problem, cfg) == "flash"


def test_a_bias_has_tiles_of_its_own():
    """Two programs with three loads in flight would not fit a multiprocessor beside the bias's tiles; bits of a mask do."""
    q, bias = jnp.ones((1, 64, 1, 128), jnp.bfloat16), jnp.ones((1, 1, 64, 64), jnp.bfloat16)
    with on_device(Device("gpu", "NVIDIA H200", 90)):
        tiles = lambda **given: Plan.of(AttentionProblem.from_arguments(q, q, q, **given), HEURISTIC).forward
        assert tiles() == tiles(attention_mask=bias > 0) == Tiles(64, 64, 4, 3)
        assert tiles(bias=bias) == Tiles(128, 64, 8, 3)
        assert tiles(bias=bias[:, :, :1]) == Tiles(64, 64, 4, 3)


@pytest.mark.skipif(not ON_GPU, reason="compiled kernels")
@pytest.mark.parametrize("option", ["plain", "cap", "decode"])
def test_every_candidate_is_right(option):
    options: dict[str, Any] = {"soft_cap": 20.0} if option == "cap" else {"segments": "decode"} if option == "decode" else {}
    q_len = 2 if option == "decode" else 300
    case = AttentionCase(
        "tuned", q_len=q_len, kv_len=600, channels=128, value_channels=128, dtype="bfloat16", causal=True, **options
    )
    tried = TRITON.candidates(case.problem)
    assert len(tried) > 1
    for cfg in tried:
        check(case, cfg=cfg)


@pytest.mark.skipif(not ON_GPU, reason="compiled kernels")
def test_gradients_are_reproducible():
    case = AttentionCase(
        "again", q_len=700, kv_len=700, channels=64, value_channels=64, dtype="bfloat16", bias=(1, "H", "T", "S")
    )
    first, second = (case.value_and_gradients(attention, weights=False) for _ in range(2))
    for name, x in first.items():
        np.testing.assert_array_equal(x, second[name])


@pytest.mark.alone
@pytest.mark.skipif(not ON_GPU, reason="needs an H200's memory")
def test_more_than_two_to_the_31_elements():
    """The last tokens of a call whose arrays have more elements than an int32 counts, against a short call on them alone."""
    T, H, D, window, last = (2**31 // (16 * 128)) + 4096, 16, 128, 100, 1000
    q, k, v, do = (jax.random.normal(jax.random.key(n), (1, T, H, D), jnp.bfloat16) for n in range(4))
    run = functools.partial(attention, causal=True, sliding_window=(window, 0), dtype=None, return_weights=False)

    @jax.jit
    def both(q, k, v, do):
        output, pull = jax.vjp(lambda *x: run(*x)[0], q, k, v)
        return [x[:, -(last - window) :].astype(jnp.float32) for x in (output, *pull(do))]

    got, want = both(q, k, v, do), both(*(x[:, -last:] for x in (q, k, v, do)))
    for x, y in zip(got, want, strict=True):
        assert relative_rms(np.asarray(x), np.asarray(y)) < 1e-2
