"""The calls of linear attention that GPUs are measured and tuned with: a table's rows, by shape and kind of gate."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Arrays = dict[str, jax.Array]
SHAPES = {
    "8x2048x16x128x128": (8, 2048, 16, 128, 128),
    "1x16384x16x128x128": (1, 16384, 16, 128, 128),
    "4x4096x32x64x64": (4, 4096, 32, 64, 64),
    "8x4096x4x256x512": (8, 4096, 4, 256, 512),
    "packed 32768x16x128x128": (1, 32768, 16, 128, 128),
}
LENGTHS = (96, 4100, 777, 2048, 300, 5000, 64, 1500, 3333, 12, 4095, 2500, 1800, 6000, 900, 243)  # 16 sequences, 32768 tokens
KINDS = ("gk", "g", "g_gamma", "none")
RESETS = "gk, resets"  # in every chunk, in an eighth of the channels of each token


def rows() -> list[tuple[str, str]]:
    """(shape, kind of gate) of every row."""
    out = [(name, kind) for kind in KINDS for name in SHAPES]
    skipped = {("8x4096x4x256x512", "g_gamma"), ("8x4096x4x256x512", "none"), ("packed 32768x16x128x128", "none")}
    return [row for row in out if row not in skipped] + [("8x2048x16x128x128", "gk+gv")]


def inputs(name: str, kind: str) -> tuple[Arrays, jax.Array, np.ndarray | None]:
    """(arrays, adjoint of the output, cu_seqlens)."""
    B, T, H, K, V = SHAPES[name]
    keys = iter(jax.random.split(jax.random.key(0), 8))
    normal = lambda *shape: jax.random.normal(next(keys), shape, jnp.float32)
    mild = lambda *shape: jax.nn.log_sigmoid(normal(*shape)) / 16
    arrays = {"query": normal(B, T, H, K), "key": normal(B, T, H, K), "value": normal(B, T, H, V)}
    arrays |= {"gk": mild(B, T, H, K)} if "gk" in kind else {}
    arrays |= {"gv": mild(B, T, H, V)} if "gv" in kind else {}
    arrays = {n: x.astype(jnp.bfloat16) for n, x in arrays.items()}
    if kind == "g":
        arrays["g"] = mild(B, T, H)
    if kind == "g_gamma":
        arrays["g_gamma"] = -jnp.linspace(0.01, 0.3, H)
    do = normal(B, T, H, V).astype(jnp.bfloat16)
    cu = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int32) if name.startswith("packed") else None
    return arrays, do, cu


def calls() -> dict[str, dict[str, Any]]:
    """Arguments of `recurrent_attention`, as shapes, by the row's name, and a decode step."""
    found: dict[str, dict[str, Any]] = {}
    for shape, kind in rows():
        arrays = jax.eval_shape(lambda shape=shape, kind=kind: inputs(shape, kind)[0])
        if shape.startswith("packed"):
            arrays["cu_seqlens"] = jax.ShapeDtypeStruct((len(LENGTHS) + 1,), jnp.int32)
        found[f"{shape} {kind}"] = arrays
    step = jax.ShapeDtypeStruct((128, 1, 16, 128), jnp.bfloat16)
    state = jax.ShapeDtypeStruct((128, 16, 128, 128), jnp.float32)
    found["decode gk"] = {"query": step, "key": step, "value": step, "gk": step, "initial_state": state}
    return found
