"""`vmap` of packed calls as one larger call, by a call that is simple enough to see through."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._linear.batching import foldable


def summed(arrays, cu_seqlens):
    """Running sums [1, T] of each sequence's tokens, from its initial state [N], and what they end at [N]."""
    outputs = jnp.zeros_like(arrays["query"])
    token = jnp.arange(outputs.shape[1])
    finals = []
    for n in range(cu_seqlens.shape[0] - 1):
        mine = (token >= cu_seqlens[n]) & (token < cu_seqlens[n + 1])
        sums = arrays["initial_state"][n] + jnp.cumsum(jnp.where(mine, arrays["query"], 0), 1)
        outputs = jnp.where(mine, sums, outputs)
        finals.append(sums[0, -1])
    return {"output": outputs, "final": jnp.stack(finals)}


@pytest.mark.parametrize("mapped", [("query",), ("cu_seqlens",), ("query", "initial_state", "cu_seqlens")], ids=str)
def test_what_lies_after_the_last_sequence_is_in_none(mapped):
    """Traced offsets may end before the row does; under `vmap` the last sequence went on to the end of the row."""
    rng = np.random.default_rng(0)
    given = {
        "query": jnp.asarray(rng.normal(size=(2, 1, 8)), jnp.float32),
        "initial_state": jnp.asarray(rng.normal(size=(2, 3)), jnp.float32),
        "cu_seqlens": jnp.asarray([[0, 3, 3, 5], [0, 0, 7, 8]], jnp.int32),
    }
    axes = {name: 0 if name in mapped else None for name in given}
    given = {name: x if name in mapped else x[0] for name, x in given.items()}

    def call(given):
        arrays = {name: x for name, x in given.items() if name != "cu_seqlens"}
        return foldable(summed, arrays=arrays, cu_seqlens=given["cu_seqlens"])

    many = jax.vmap(call, (axes,))(given)
    for i in range(2):
        one = call({name: x[i] if name in mapped else x for name, x in given.items()})
        for name, want in one.items():
            np.testing.assert_allclose(many[name][i], want, rtol=1e-5, atol=1e-6)
