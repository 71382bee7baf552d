"""Both recurrences and exchanges, packed and not, in float64 and without promotion of dtypes: the whole call's values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from ejkernel.modules import GatedDeltaRuleConfig, RecurrentAttentionConfig, gated_delta_rule, recurrent_attention


def check(call: Callable[..., Any], arrays: Sequence[jax.Array], cfg: Any, offsets: jax.Array | None) -> None:
    """Raises where the call over four devices gives other values or gradients than the whole call."""
    mesh = jax.make_mesh((4,), ("time",), axis_types=(AxisType.Auto,))
    tokens = P(None, "time")
    split = functools.partial(call, cu_seqlens=offsets, sequence_axis="time", cfg=cfg)
    mapped = jax.shard_map(split, mesh=mesh, in_specs=(tokens,) * len(arrays), out_specs=tokens)
    whole = functools.partial(call, cu_seqlens=offsets, platform="xla")
    results = lambda f: jax.tree.leaves(jax.jit(jax.value_and_grad(lambda x: jnp.sum(jnp.sin(f(*x)))))(arrays))
    for got, want in zip(results(mapped), results(whole), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-9, atol=1e-12)


def main() -> None:
    rng = np.random.default_rng(0)
    q, k, v = (jnp.asarray(rng.normal(size=(1, 16, 2, 4))) / 2 for _ in range(3))
    g = -jnp.abs(jnp.asarray(rng.normal(size=(1, 16, 2))))
    for call, arrays, config in (
        (recurrent_attention, (q, k, v, g), RecurrentAttentionConfig),
        (gated_delta_rule, (q, k, v, jnp.exp(g), g), GatedDeltaRuleConfig),
    ):
        for exchange in ("gather", "steps"):
            for kind in (None, jnp.int32, jnp.int64):
                offsets = None if kind is None else jnp.asarray([0, 3, 3, 11, 16], kind)
                check(call, arrays, config(platform="xla", exchange=exchange), offsets)
    print("alike")


if __name__ == "__main__":
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        main()
