"""Calls whose Triton kernels are compiled without a GPU, to see what they need of one."""

from __future__ import annotations

import jax

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
EVERY = [*CALLS, "decode", *DELTA_CALLS]


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
