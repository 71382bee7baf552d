"""The short convolution where time is split, as the page on several devices has it: prints the largest difference of each case.

It runs in a process with simulated devices.
"""

from __future__ import annotations

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ejkernel import causal_conv1d
from tests.documentation.pages import ROOT, blocks

T, W, C = 32, 4, 3
OFFSETS = {
    "whole": None,
    "packed": [0, 5, T],
    "borders": [0, 7, 8, 8, 9, 16, 18, T, T],
    "one over all": [0, 0, T],
}


def recipe() -> Any:
    """`split_conv1d` of the page."""
    code = next(block.code for block in blocks(ROOT / "docs" / "several_devices.md") if "def split_conv1d" in block.code)
    names: dict[str, Any] = {}
    exec(code, names)
    return names["split_conv1d"]


def differences() -> dict[str, float]:
    split_conv1d = recipe()
    mesh = jax.make_mesh((4,), ("time",), axis_types=(AxisType.Auto,))
    x = jax.random.normal(jax.random.key(0), (1, T, C))
    weight = jax.random.normal(jax.random.key(1), (W, C))
    ends = jnp.cos(jnp.arange(x.size).reshape(x.shape))
    found = {}
    for name, offsets in OFFSETS.items():
        local = lambda x, weight, offsets=offsets: split_conv1d(x, weight, "time", offsets, activation="silu")
        split = jax.shard_map(local, mesh=mesh, in_specs=(P(None, "time"), P()), out_specs=P(None, "time"))
        whole = lambda x, weight, offsets=offsets: causal_conv1d(x, weight, cu_seqlens=offsets, activation="silu")
        both = [
            jax.jit(jax.value_and_grad(lambda x, w, f=f: jnp.sum(f(x, w) * ends), argnums=(0, 1)))(x, weight)
            for f in (split, whole)
        ]
        both = [jax.tree.leaves((f(x, weight), of)) for f, of in zip((split, whole), both, strict=True)]
        found[name] = max(float(np.abs(a - b).max()) for a, b in zip(*both, strict=True))
    return found


if __name__ == "__main__":
    print(json.dumps(differences()))
