"""Which route a call of softmax attention takes: decided once, the same for forward, backward, candidates and refusals."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")

from ejkernel._device import Device
from ejkernel.callib import Launch, instead_of_launching
from ejkernel.kernels._attention import AttentionConfig, AttentionProblem
from ejkernel.kernels._triton.attention._launches import backward, forward, shared_gradients
from ejkernel.kernels._triton.attention._plan import DECODED_QUERIES, LEAST_PART, PROGRAMS, Plan
from ejkernel.kernels._triton.attention._platform import HEURISTIC, TritonAttention, route_name
from ejkernel.kernels._triton.attention._solve import DIFFERENTIABLE

TRITON = TritonAttention()
B, H, HK = 2, 4, 2
OTHERS = ("mask", "q_segment_ids", "kv_segment_ids", "q_positions", "kv_positions", "dropout_words")
MASKS: dict[str, tuple[Any, ...]] = {
    "": (),
    "mask": (B, 1, "T", "S"),
    "mask of heads": (1, H, "T", "S"),
    "mask of keys": (B, 1, 1, "S"),
}
BIASES: dict[str, tuple[Any, ...]] = {
    "": (),
    "bias": (1, H, "T", "S"),
    "bias of keys": (B, HK, 1, "S"),
    "bias of queries": (1, 1, "T", 1),
}
IDS = {"": (), "segments": ("segment_ids",), "documents": ("segment_ids", "positions")}
FLAGS = ("sinks", "scale", "dropout", "cap", "window")
CHANNELS = [(16, 16), (64, 64), (100, 36), (128, 128), (192, 128), (256, 256), (1, 256)]
LENGTHS = [(1, 700), (DECODED_QUERIES, 90), (17, 90), (300, 333), (2048, 2048)]


def problem(
    T: int, S: int, D: int = 64, DV: int = 64, dtype: str = "bfloat16", capability: int = 90, mask: str = "", bias: str = "",
    ids: str = "", flags: tuple[str, ...] = (),
) -> AttentionProblem:  # fmt: skip
    """A call as shapes."""
    size = {"T": T, "S": S}
    of = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct(tuple(size.get(n, n) for n in shape), jnp.dtype(dtype))
    arrays: dict[str, Any] = {"query": of(B, T, H, D), "key": of(B, S, HK, D), "value": of(B, S, HK, DV)}
    arrays |= {"mask": of(*MASKS[mask], dtype="bool")} if mask else {}
    arrays |= {"bias": of(*BIASES[bias])} if bias else {}
    arrays |= {f"{of_}_{name}": of(B, n, dtype="int32") for name in IDS[ids] for of_, n in (("q", T), ("kv", S))}
    arrays |= {"sinks": of(H, dtype="float32")} if "sinks" in flags else {}
    arrays |= {"traced_scale": of(dtype="float32")} if "scale" in flags else {}
    arrays |= {"dropout_words": of(B, H, T, 2, dtype="uint32"), "dropout_prob": 0.1} if "dropout" in flags else {}
    arrays |= {"soft_cap": 30.0} if "cap" in flags else {}
    arrays |= {"left": 20, "right": 3} if "window" in flags else {"right": 0}
    return AttentionProblem(**arrays, device=Device("gpu", "a GPU", capability))


def expected(call: AttentionProblem) -> str:
    """The route by the words of the documentation, beside the code that chooses it."""
    if call.q_len > DECODED_QUERIES:
        return "flash"
    rows = max(16, min(64, 1 << (call.q_len * H // HK - 1).bit_length()))
    block = min(rows, 32) if call.dtype == jnp.float32 or max(call.head_dim, call.value_dim) > 128 else rows
    programs = B * HK * -(-call.q_len * (H // HK) // block)
    parts = max(1, min(-(-PROGRAMS // programs), call.kv_len // LEAST_PART))
    return "flash decoding" if parts == 1 else f"flash decoding, keys in {parts} parts"


def agrees(call: AttentionProblem) -> None:
    assert TRITON.supports(call) is None
    first, *others = found = TRITON.candidates(call)
    assert first == TRITON.heuristic(call) == HEURISTIC
    assert len(set(found)) == len(found) > 1
    plan = Plan.of(call, first)
    assert hash(plan) == hash(Plan.of(call, first))  # static data: the same call is not compiled twice
    assert route_name(plan) == TRITON.route(call, first) == expected(call)
    for cfg in others:
        assert TRITON.refuses(call, cfg) is None, cfg
        other = Plan.of(call, cfg)
        # A candidate changes the forward kernel's tiles alone.
        assert (other.grouped, other.kernels) == (plan.grouped, plan.kernels)
        assert TRITON.route(call, cfg).startswith("flash decoding") == plan.grouped


@pytest.mark.parametrize(("T", "S"), LENGTHS, ids=str)
def test_every_call_has_one_route(T, S):
    """For every option, dtype, size and device; candidates and refusals agree on it."""
    for mask, bias, ids in itertools.product(MASKS, BIASES, IDS):
        for flags in ((), *((flag,) for flag in FLAGS), FLAGS):
            agrees(problem(T, S, mask=mask, bias=bias, ids=ids, flags=flags))
    for (D, DV), dtype, capability in itertools.product(CHANNELS, ("bfloat16", "float16", "float32"), (80, 86, 89, 90, 120)):
        agrees(problem(T, S, D, DV, dtype, capability, mask="mask", bias="bias"))


def launches_of(call: AttentionProblem) -> tuple[dict[str, Any], dict[str, Any]]:
    """(arrays, their gradients as shapes) of a call that is traced, forward and backward."""
    plan = Plan.of(call, HEURISTIC)
    arrays = {name: x for name in DIFFERENTIABLE if (x := getattr(call, name)) is not None}
    others = {name: x for name in OTHERS if (x := getattr(call, name)) is not None}

    def gradients(arrays: Any, others: Any) -> Any:
        output, lse = forward(plan, arrays, others)
        found = backward(plan, arrays, others, output, lse, output)
        return {**found, **shared_gradients(plan, arrays, lse, found)}

    return arrays, jax.eval_shape(gradients, arrays, others)


def launched(call: AttentionProblem) -> list[str]:
    """The kernels of both passes; every gradient has its argument's shape and dtype."""
    seen: list[Launch] = []
    with instead_of_launching(seen.append):
        arrays, grads = launches_of(call)
    kinds = lambda of: {name: (of[name].shape, of[name].dtype) for name in arrays}
    assert kinds(grads) == kinds(arrays)
    return [launch.name for launch in seen]


OPTIONS: list[dict[str, Any]] = [
    {},
    *({"mask": mask} for mask in MASKS if mask),
    *({"bias": bias} for bias in BIASES if bias),
    *({"ids": ids} for ids in IDS if ids),
    *({"flags": (flag,)} for flag in FLAGS),
    {"mask": "mask of heads", "bias": "bias", "ids": "documents", "flags": FLAGS},
]


@pytest.mark.parametrize("option", OPTIONS, ids=str)
def test_kernels_of_every_option(option):
    """The backward pass finds what it needs, whatever the forward pass was."""
    packs = ["pack_mask"] if option.get("mask", "") in ("mask", "mask of heads") else []
    of_bias = ["flash_bias_gradient"] if option.get("bias") else []
    gradients = ["row_products", "flash_query_gradient", "flash_key_gradient", *of_bias]
    assert launched(problem(64, 80, **option)) == [*packs, "flash_forward", *packs, *gradients]
    assert launched(problem(2, 600, **option)) == ["flash_forward", "combine_parts", *gradients]


@pytest.mark.parametrize(
    ("device", "reason"),
    [
        (Device("cpu", "cpu"), None),  # interpreted
        (Device("gpu", "NVIDIA A100", 80), None),
        (Device("gpu", "Tesla V100", 70), "compute capability 8.0 or newer; Tesla V100 (gpu) has 7.0"),
    ],
    ids=str,
)
def test_devices(device, reason):
    found = TRITON.supports(dataclasses.replace(problem(64, 64), device=device))
    assert found is None if reason is None else reason in found


def test_what_is_refused():
    call = problem(64, 64)
    refused = functools.partial(TRITON.refuses, call)
    assert "only schedule 'flash'" in refused(AttentionConfig("direct"))
    for name, value in itertools.product(("block_q", "block_k"), (8, 48, 512)):
        assert f"{name} must be None or one of" in refused(AttentionConfig("flash", **{name: value}))
    assert "num_warps" in refused(AttentionConfig("flash", num_warps=5))
    assert "up to 256; got 300" in TRITON.supports(problem(64, 64, D=300))
    assert "softmax" in TRITON.supports(dataclasses.replace(call, softmax_dtype=jnp.dtype("bfloat16")))
