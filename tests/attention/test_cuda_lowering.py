"""cuDNN attention without a GPU: what it covers, and what the program for a GPU calls."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo

from ejkernel._device import Device, on_device
from ejkernel.kernels._attention import AttentionConfig, AttentionProblem
from ejkernel.kernels._attention.packing import Packing
from ejkernel.kernels._cuda import attention as cuda_attention
from ejkernel.kernels._cuda.attention import _supports
from ejkernel.kernels._registry import kernel_registry
from ejkernel.types.mask import MaskInfo
from tests.attention.test_gpu import CASES as GPU_CASES

B, T, H, HKV, D = 2, 64, 4, 2, 32
PACKED = np.array([[0] * 20 + [1] * 24 + [-1] * 20, [3] * 64], np.int32)


@pytest.fixture(autouse=True)
def _cudnn_is_there(monkeypatch):
    """Lowering asks for cuDNN's version, which a machine without a GPU does not have."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    with on_device(Device("gpu", "NVIDIA A100", 80)):
        yield


def arrays(q_len: int = T, kv_len: int = T, channels: int = D, dtype=jnp.bfloat16, value_channels: int | None = None):
    shapes = (B, q_len, H, channels), (B, kv_len, HKV, channels), (B, kv_len, HKV, value_channels or channels)
    return tuple(jnp.ones(shape, dtype) for shape in shapes)


def calls(function, *args) -> list[tuple[str, str]]:
    """The cuDNN calls of the program for a GPU, with the kind of mask each applies."""
    text = jax.jit(function).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
    names = re.findall(r"@__cudnn\$(\w+)", text)
    kinds = re.findall(r"mask_type\\22: \\22([A-Z_]+)", text)
    assert len(names) == len(kinds)
    return list(zip(names, kinds, strict=True))


def run(**options):
    return lambda q, k, v, **more: cuda_attention(q, k, v, dtype=None, **options, **more)[0]


@pytest.mark.parametrize(
    ("options", "call"),
    [
        ({}, ("fmhaSoftmax", "NO_MASK")),
        ({"causal": True}, ("fmhaSoftmax", "CAUSAL")),
        ({"causal": True, "sliding_window": 8}, ("fmhaSoftmax", "CAUSAL")),
        ({"sliding_window": (8, 0)}, ("fmhaSoftmax", "CAUSAL")),
        ({"sliding_window": (T, T)}, ("fmhaSoftmax", "NO_MASK")),
        ({"attention_mask": np.ones((B, T), bool)}, ("fmhaScaleBiasSoftmax", "NO_MASK")),
        ({"attention_mask": np.ones((B, HKV, T, T), bool), "causal": True}, ("fmhaScaleBiasSoftmax", "CAUSAL")),
        ({"bias": np.ones((1, HKV, T, T), jnp.bfloat16), "causal": True}, ("fmhaScaleBiasSoftmax", "CAUSAL")),
        ({"mask_info": MaskInfo.from_segments(PACKED), "causal": True}, ("fmhaSoftmax", "PADDING_CAUSAL")),
        ({"mask_info": MaskInfo.from_segments(PACKED)}, ("fmhaSoftmax", "PADDING")),
        # A window over segments may leave a query without keys, which lengths cannot say.
        ({"mask_info": MaskInfo.from_segments(PACKED), "sliding_window": 3}, ("fmhaScaleBiasSoftmax", "NO_MASK")),
    ],
)
def test_lowers_to_one_cudnn_call_each_way(options, call):
    q, k, v = arrays()
    assert calls(run(**options), q, k, v) == [call]
    gradient = jax.grad(lambda *x: run(**options)(*x).astype(jnp.float32).sum(), (0, 1, 2))
    name, kind = call
    assert calls(gradient, q, k, v) == [(name, kind), (f"{name}Backward", kind)]


def test_traced_segments_go_by_a_mask():
    q, k, v = arrays()
    traced = lambda q, k, v, ids: run(mask_info=MaskInfo.from_segments(ids), causal=True)(q, k, v)
    assert calls(traced, q, k, v, jnp.asarray(PACKED)) == [("fmhaScaleBiasSoftmax", "NO_MASK")]


def test_weights_that_are_not_used_leave_no_scores_in_the_program():
    q, k, v = arrays()
    text = jax.jit(run(causal=True)).trace(q, k, v).lower(lowering_platforms=("cuda",)).as_text()
    unused = jax.jit(lambda *x: cuda_attention(*x, causal=True, dtype=None))
    both = unused.trace(q, k, v).lower(lowering_platforms=("cuda",)).as_text()
    scores = f"{T}x{T}xbf16"
    assert scores not in re.sub(r"func private.*", "", text.split("func.func private")[0])
    assert scores in both


@pytest.mark.parametrize(
    ("options", "shape", "reason"),
    [
        ({}, {"dtype": jnp.float32}, "float16 and bfloat16"),
        ({"softmax_dtype": jnp.bfloat16}, {}, "softmax is in float32"),
        ({}, {"value_channels": 16}, "as many channels"),
        ({}, {"channels": 20}, "multiple of 8"),
        ({}, {"channels": 512}, "multiple of 8 up to"),
        ({}, {"q_len": 0}, "size 0"),
        ({"logits_soft_cap": 3.0}, {}, "logits_soft_cap"),
        ({"softmax_aux": np.zeros((H, 1), np.float32)}, {}, "sinks"),
        ({"dropout_prob": 0.1, "deterministic": False, "dropout_rng": jax.random.key(0)}, {}, "dropout"),
        ({"sliding_window": (3, 3)}, {}, "3 keys to the right"),
        ({"sliding_window": (3, T)}, {}, "without a right end"),
        ({"sliding_window": (3, 0)}, {"kv_len": 8}, "no key within the window"),
        ({"sliding_window": (10, 0)}, {"kv_len": 63}, "odd number of keys"),
        ({"sliding_window": (3, 0), "attention_mask": np.ones((B, T), bool)}, {}, "a window together with"),
        ({"bias": np.zeros((1, 1, T, T), np.float32)}, {}, "bias must be in the compute dtype"),
        ({"attention_mask": np.ones((B, 63), bool)}, {"q_len": 63, "kv_len": 63}, "even lengths"),
    ],
)
def test_says_what_it_does_not_cover(options, shape, reason):
    q, k, v = arrays(**shape)
    problem = AttentionProblem.from_arguments(q, k, v, dtype=None, **options)
    assert reason in cuda_attention.supports(problem)
    with pytest.raises(ValueError, match="attention cannot run on platform 'cuda'"):
        cuda_attention(q, k, v, dtype=None, **options)


def test_a_traced_scale_is_not_covered():
    def reason(scale):
        return cuda_attention.supports(AttentionProblem.from_arguments(*arrays(), softmax_scale=scale, dtype=None))

    seen = []
    jax.eval_shape(lambda scale: seen.append(reason(scale)), jax.ShapeDtypeStruct((), jnp.float32))
    assert "softmax_scale" in seen[0]
    assert reason(0.5) is None


def test_masks_too_large_for_a_bias_are_not_covered(monkeypatch):
    monkeypatch.setattr(_supports, "MASK_BYTES", B * T * T)
    problem = AttentionProblem.from_arguments(*arrays(), attention_mask=np.ones((B, T), bool), dtype=None)
    assert "more than" in cuda_attention.supports(problem)


def test_only_the_fused_schedule():
    with pytest.raises(ValueError, match="only schedule 'fused'"):
        cuda_attention(*arrays(), cfg=AttentionConfig("direct"))


def test_packing_takes_segments_apart_and_together():
    kv = np.array([[1] * 10 + [0] * 30 + [7] * 24, [3] * 60 + [-1] * 4], np.int32)
    packing = Packing.of(MaskInfo.from_segments(PACKED, kv), B)
    assert packing.q_lengths.tolist() == [20, 24, 64]
    assert packing.kv_lengths.tolist() == [30, 10, 60]
    rng = np.random.default_rng(0)
    q, k = rng.normal(size=(B, T, 1, 3)), rng.normal(size=(B, T, 1, 3))
    rows, keys = packing.unpack(q, packing.q_rows), packing.unpack(k, packing.kv_rows)
    np.testing.assert_array_equal(rows[1, :24], q[0, 20:44])
    np.testing.assert_array_equal(keys[0, :30], k[0, 10:40])
    expected = np.where((PACKED >= 0)[:, :, None, None], q, 0)
    np.testing.assert_allclose(packing.pack(rows, q.shape), expected, rtol=1e-6)


def test_packing_needs_plain_positions_and_known_ids():
    assert Packing.of(MaskInfo.from_segments(PACKED, q_positions=PACKED * 0 + 5), B) is None
    assert Packing.of(MaskInfo.from_segments(PACKED[:1], np.full((1, T), 9)), 1) is None
    cu = MaskInfo.from_cu_seqlens(jnp.array([0, 3, 8]), 10)
    assert Packing.of(cu, 1).q_lengths.tolist() == [3, 5]
    seen = []
    jax.eval_shape(lambda ids: seen.append(Packing.of(MaskInfo.from_segments(ids), B)), jnp.asarray(PACKED))
    assert seen == [None]


@pytest.mark.parametrize("case", GPU_CASES, ids=str)
def test_every_case_that_runs_on_a_gpu_lowers_for_it(case):
    names = sorted(case.arrays)
    options = case.options

    def gradients(*arrays):
        run = lambda *x: cuda_attention(**dict(zip(names, x, strict=True)), **options)[0].astype(jnp.float32).sum()
        return jax.grad(run, tuple(range(len(names))))(*arrays)

    assert len(calls(gradients, *(case.arrays[name] for name in names))) == 2


MASK = jnp.ones((B, 1, T, T), bool)
BIAS = jnp.zeros((1, H, T, T), jnp.bfloat16)


@pytest.mark.parametrize("without_triton", [False, True])
@pytest.mark.parametrize(
    ("options", "best"),
    [
        ({}, "cuda"),
        ({"causal": True}, "cuda"),
        ({"sliding_window": 8, "causal": True}, "cuda"),
        ({"attention_mask": MASK}, "triton"),
        ({"attention_mask": MASK[:, 0, 0]}, "triton"),
        ({"bias": BIAS}, "triton"),
        ({"logits_soft_cap": 3.0}, "triton"),
    ],
    ids=str,
)
def test_auto_takes_what_was_measured_to_be_the_fastest(options, best, without_triton):
    """cuDNN reads masks and biases as numbers for every score. Where Triton is not there it still beats xla."""
    pytest.importorskip("triton", reason="the triton platform needs Triton")
    problem = AttentionProblem.from_arguments(*arrays(), dtype=None, **options)
    there = lambda entry: not (without_triton and str(entry.platform) == "triton")
    chosen = kernel_registry.select("attention", problem=problem, among=there)
    if without_triton and best == "triton":
        best = "cuda" if cuda_attention.supports(problem) is None else "xla"
    assert str(chosen.platform) == best
