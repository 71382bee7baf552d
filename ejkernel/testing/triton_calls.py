"""Calls whose Triton kernels are compiled without a GPU, to see what they need of one."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from ejkernel.types.mask import MaskInfo

CALLS = {  # name: (gates, K, V, dtype)
    "none": ((), 128, 128, "bfloat16"),
    "g": (("g",), 128, 128, "bfloat16"),
    "g_gamma": (("g_gamma",), 64, 64, "bfloat16"),
    "gk": (("gk",), 128, 128, "bfloat16"),
    "gk wide": (("gk",), 256, 512, "bfloat16"),
    "g broad": (("g",), 256, 512, "bfloat16"),
    "g wide": (("g",), 512, 320, "bfloat16"),
    "gk gv": (("gk", "gv"), 128, 96, "bfloat16"),
    "gk gv forward": (("gk", "gv"), 128, 96, "bfloat16"),
    "all float32": (("g", "gk", "gv", "g_gamma"), 64, 64, "float32"),
    "g float16": (("g",), 64, 64, "float16"),
}

DELTA_CALLS: dict[str, tuple[str | None, int, int, str]] = {  # name: (gate, K, V, dtype)
    "delta head": ("head", 128, 128, "bfloat16"),
    "delta channel": ("channel", 128, 128, "bfloat16"),
    "delta none wide": (None, 256, 256, "bfloat16"),
    "delta channel wide": ("channel", 256, 256, "bfloat16"),
    "delta head float32": ("head", 128, 128, "float32"),
    "delta channel float32": ("channel", 64, 64, "float32"),
}
ATTENTION_CALLS: dict[str, tuple[int, int, str, tuple[str, ...]]] = {  # name: (D, V, dtype, what else is given)
    "attention": (128, 128, "bfloat16", ()),
    "attention 64": (64, 64, "bfloat16", ("soft_cap", "sinks")),
    "attention 256": (256, 256, "bfloat16", ()),
    "attention everything": (128, 96, "float16", ("soft_cap", "sinks", "bias", "mask", "segments", "dropout", "scale")),
    "attention float32": (64, 64, "float32", ("bias",)),
    "attention decode": (128, 128, "bfloat16", ("segments", "one query")),
}
CONVOLUTION_CALLS = {  # name: (width, dtype, packed)
    "convolution": (4, "bfloat16", False),
    "convolution packed": (4, "bfloat16", True),
    "convolution float32": (8, "float32", True),
}
EVERY = [*CALLS, "decode", *DELTA_CALLS, *ATTENTION_CALLS, *CONVOLUTION_CALLS]


class AttentionArguments(NamedTuple):
    """Arguments of `attention`: arrays as shapes, those that gradients are taken of apart, and everything else."""

    arrays: dict[str, Any]
    others: dict[str, Any]
    options: dict[str, Any]


def attention_arguments(D: int, V: int, dtype: str, given: tuple[str, ...]) -> AttentionArguments:
    """Two rows of 1000 tokens, or of one over 8192 keys, four heads over two."""
    decode = "one query" in given
    B, S, H, Hkv = 2, 8192 if decode else 1000, 4, 2
    T = 1 if decode else S
    of = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct(shape, dtype)
    arrays = {"query": of(B, T, H, D), "key": of(B, S, Hkv, D), "value": of(B, S, Hkv, V)}
    arrays |= {"bias": of(1, H, T, S)} if "bias" in given else {}
    arrays |= {"softmax_aux": of(H, 1, dtype="float32")} if "sinks" in given else {}
    arrays |= {"softmax_scale": of(dtype="float32")} if "scale" in given else {}
    others: dict[str, Any] = {"attention_mask": of(B, 1, T, S, dtype="bool")} if "mask" in given else {}
    if "segments" in given:
        ids: dict[str, Any] = {"q_segment_ids": of(B, T, dtype="int32"), "kv_segment_ids": of(B, S, dtype="int32")}
        others["mask_info"] = MaskInfo(**ids)
    options: dict[str, Any] = {"causal": not decode, "dtype": None, "return_weights": False}
    options |= {"logits_soft_cap": 50.0} if "soft_cap" in given else {}
    if "dropout" in given:
        options |= {"deterministic": False, "dropout_prob": 0.1, "dropout_rng": jax.random.key(0)}
    return AttentionArguments(arrays, others, options)


def convolution_arguments(width: int, dtype: str, packed: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """1000 tokens of 300 channels: two rows, or packed; arrays that gradients are taken of, and offsets."""
    of = jax.ShapeDtypeStruct
    arrays = {"x": of((1 if packed else 2, 1000, 300), dtype), "weight": of((width, 300), dtype), "bias": of((300,), dtype)}
    return arrays, {"cu_seqlens": of((5,), "int32")} if packed else {}


def delta_arguments(gate: str | None, K: int, V: int, dtype: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Two rows of 1000 tokens, two key heads for four value heads."""
    B, T, Hk, H = 2, 1000, 2, 4
    of = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct(shape, dtype)
    arrays = {"query": of(B, T, Hk, K), "key": of(B, T, Hk, K), "value": of(B, T, H, V), "beta": of(B, T, H)}
    if gate is not None:
        arrays["g"] = of(B, T, H, *([K] if gate == "channel" else []))
    return arrays | {"initial_state": of(B, H, K, V, dtype="float32")}


def arguments(gates: tuple[str, ...], K: int, V: int, dtype: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Two rows of 1000 tokens, four heads over two."""
    B, T, H, Hkv = 2, 1000, 4, 2
    of = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct(shape, dtype)
    gate = {"g": of(B, T, H, dtype="float32"), "gk": of(B, T, Hkv, K), "gv": of(B, T, H, V), "g_gamma": of(H, dtype="float32")}
    arrays = {"query": of(B, T, H, K), "key": of(B, T, Hkv, K), "value": of(B, T, Hkv, V)}
    return arrays | {n: gate[n] for n in gates} | {"initial_state": of(B, H, K, V, dtype="float32")}
