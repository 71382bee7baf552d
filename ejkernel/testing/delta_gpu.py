"""The calls of the delta rule that GPUs are measured and tuned with: a table's rows, by shape and kind of gate."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.testing.linear_gpu import LENGTHS

Arrays = dict[str, jax.Array]
SHAPES = {  # B, T, Hk, H, K, V
    "8x2048x16x128x128": (8, 2048, 16, 16, 128, 128),
    "1x16384x16x128x128": (1, 16384, 16, 16, 128, 128),
    "4x4096x16/32x128x128": (4, 4096, 16, 32, 128, 128),
    "4x4096x32x128x128": (4, 4096, 32, 32, 128, 128),
    "4x4096x32x64x64": (4, 4096, 32, 32, 64, 64),
    "packed 32768x16x128x128": (1, 32768, 16, 16, 128, 128),
}
GROUPED, ALONE = "4x4096x16/32x128x128", "4x4096x32x128x128"  # gates per head have the first, per key channel the second
ROWS = [
    *((name, "head") for name in SHAPES if name != ALONE),
    *((name, "channel") for name in SHAPES if name != GROUPED),
    ("8x2048x16x128x128", "none"),
    ("8x2048x16x128x128", "head, strong"),
    ("8x2048x16x128x128", "channel, strong"),
]


def inputs(name: str, kind: str) -> tuple[Arrays, jax.Array, np.ndarray | None]:
    """(arrays, adjoint of the output, cu_seqlens). Query and key have length 1; strong: every chunk has resets."""
    B, T, Hk, H, K, V = SHAPES[name]
    keys = iter(jax.random.split(jax.random.key(0), 8))
    normal = lambda *shape: jax.random.normal(next(keys), shape, jnp.float32)
    unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    arrays = {"query": unit(normal(B, T, Hk, K)), "key": unit(normal(B, T, Hk, K)), "value": normal(B, T, H, V)}
    arrays = {n: x.astype(jnp.bfloat16) for n, x in arrays.items()}
    arrays["beta"] = jax.nn.sigmoid(normal(B, T, H)).astype(jnp.bfloat16)
    if "head" in kind:
        arrays["g"] = jax.nn.log_sigmoid(normal(B, T, H)) / 4
    if "channel" in kind:
        arrays["g"] = (jax.nn.log_sigmoid(normal(B, T, H, K)) / 16).astype(jnp.bfloat16)
    if "strong" in kind:
        arrays["g"] = jnp.where(normal(*arrays["g"].shape) > 1.6, jnp.asarray(-1e4, arrays["g"].dtype), arrays["g"])
    do = normal(B, T, H, V).astype(jnp.bfloat16)
    cu = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int32) if name.startswith("packed") else None
    return arrays, do, cu


def calls() -> dict[str, dict[str, Any]]:
    """Arguments of `gated_delta_rule`, as shapes, by the row's name, and a decode step with each gate."""
    found: dict[str, dict[str, Any]] = {}
    for shape, kind in ROWS:
        if "strong" not in kind:  # shapes are all that a call is known by
            arrays = jax.eval_shape(lambda shape=shape, kind=kind: inputs(shape, kind)[0])
            if shape.startswith("packed"):
                arrays["cu_seqlens"] = jax.ShapeDtypeStruct((len(LENGTHS) + 1,), jnp.int32)
            found[f"{shape} {kind}"] = arrays
    step = jax.ShapeDtypeStruct((128, 1, 16, 128), jnp.bfloat16)
    beta = jax.ShapeDtypeStruct((128, 1, 16), jnp.bfloat16)
    state = jax.ShapeDtypeStruct((128, 16, 128, 128), jnp.float32)
    for kind, gate in (("head", jax.ShapeDtypeStruct(beta.shape, jnp.float32)), ("channel", step)):
        one = {"query": step, "key": step, "value": step, "beta": beta, "g": gate, "initial_state": state}
        found[f"decode {kind}"] = one
    return found
