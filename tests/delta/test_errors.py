"""Bad input is refused with the argument's name, what is legal and what came; odd values give what IEEE arithmetic gives."""

from __future__ import annotations

import functools
import inspect
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._delta import GatedDeltaRuleConfig
from ejkernel.kernels._xla.gated_delta_rule import gated_delta_rule

B, T, Hk, H, K, V = 2, 6, 2, 4, 8, 5
one = lambda *shape, dtype=jnp.float32: jnp.ones(shape, dtype)
dense = {"query": one(B, T, Hk, K), "key": one(B, T, Hk, K), "value": one(B, T, H, V), "beta": one(B, T, H)}
row = {name: x[:1] for name, x in dense.items()}

WRONG = [
    (dense | {"query": one(T, Hk, K)}, ValueError, "query must be [batch, time, heads, channels] (rank 3 needs cu_seqlens)"),
    (dense | {"query": one(B, T, Hk, K, dtype=jnp.int32)}, TypeError, "query must be float32, bfloat16, float16 or float64; got int32."),
    (dense | {"key": one(B, T, Hk, K + 1)}, ValueError, "key must be [2, 6, 2, 8] (batch, time, heads, key channels) like query; got [2, 6, 2, 9]."),
    (dense | {"key": one(B, T, H, K)}, ValueError, "key must be [2, 6, 2, 8]"),
    (dense | {"value": one(B, T + 1, H, V)}, ValueError, "value must be [2, 6, value heads, value channels]"),
    (dense | {"value": one(B, T, 3, V)}, ValueError, "value must have a multiple of the 2 heads of query and key"),
    (dense | {"beta": one(B, T, H, 1)}, ValueError, "beta must be [2, 6, 4] (batch, time, value heads) to match value; got [2, 6, 4, 1]."),
    (dense | {"beta": one(B, T, Hk)}, ValueError, "beta must be [2, 6, 4]"),
    (dense | {"beta": None}, TypeError, "beta must be an array; got None."),
    (dense | {"beta": one(B, T, H, dtype=jnp.int32)}, TypeError, "beta must be float32"),
    (dense | {"g": one(B, T, Hk)}, ValueError, "g must be [2, 6, 4] (batch, time, value heads) or [2, 6, 4, 8] (..., key channels)"),
    (dense | {"g": one(B, T, H, V)}, ValueError, "got [2, 6, 4, 5]."),
    (dense | {"g": one(B, T, H, 1)}, ValueError, "got [2, 6, 4, 1]. A gate per head goes in as g[..., 0]."),
    (dense | {"initial_state": one(H, K, V)}, ValueError, "initial_state must be [2, 4, 8, 5]"),
    (dense | {"cu_seqlens": jnp.array([0, T])}, ValueError, "query must have a batch of 1 when cu_seqlens packs the sequences"),
    (dense | {"cu_seqlens": jnp.array([0, T]), "initial_state": one(B, H, K, V)}, ValueError, "query must have a batch of 1"),
    (row | {"cu_seqlens": jnp.array([0, T + 1])}, ValueError, "cu_seqlens must end at the number of tokens, 6; got 7 last."),
    ({n: x[0] for n, x in row.items()} | {"beta": row["beta"], "cu_seqlens": jnp.array([0, T])}, ValueError, "beta must be [6, 4] (tokens, value heads)"),
    (dense | {"use_qk_l2norm": 1}, TypeError, "use_qk_l2norm must be True or False"),
    (dense | {"reverse": "yes"}, TypeError, "reverse must be True or False"),
    (dense | {"softmax_scale": "large"}, TypeError, "softmax_scale must be a number"),
    (dense | {"cfg": 3}, TypeError, "cfg must be of class GatedDeltaRuleConfig or None; got int."),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "kind", "message"), WRONG)
def test_wrong_arguments(arguments, kind, message):
    with pytest.raises(kind, match=re.escape(message)):
        gated_delta_rule(**arguments)


def test_the_order_of_arguments():
    order = "query key value beta g softmax_scale initial_state reverse cu_seqlens use_qk_l2norm cfg"
    assert list(inspect.signature(gated_delta_rule).parameters) == order.split()
    by_name = gated_delta_rule(**dense, softmax_scale=0.5, reverse=True)
    np.testing.assert_array_equal(by_name[0], gated_delta_rule(*dense.values(), None, 0.5, None, True)[0])


def test_wrong_configs():
    with pytest.raises(ValueError, match="block_q must be a power of two"):
        GatedDeltaRuleConfig(block_q=48)
    for tile in ("block_k", "block_d", "num_warps", "num_stages", "block_h"):  # which nothing here would read
        cfg = GatedDeltaRuleConfig(**{tile: 64 if tile in ("block_k", "block_d") else 4})
        with pytest.raises(ValueError, match=f"{tile} must be None on xla, which chooses tiles itself"):
            gated_delta_rule(**dense, cfg=cfg)


@functools.partial(jax.jit, static_argnums=2)
def everything(arrays, cu_seqlens, schedule):
    """(output, state) and the gradients of their sum."""
    run = lambda arrays: gated_delta_rule(**arrays, cu_seqlens=cu_seqlens, cfg=GatedDeltaRuleConfig(schedule, 4))
    return run(arrays), jax.grad(lambda arrays: sum(map(jnp.sum, run(arrays))))(arrays)


@pytest.mark.parametrize("schedule", ["chunked", "recurrent"])
@pytest.mark.parametrize("name", ["beta", "value", "key", "g"])
def test_what_is_not_finite_stays_in_its_sequence_and_head(name, schedule):
    rng = np.random.default_rng(0)
    arrays = {n: jnp.asarray(rng.normal(size=(1, 16, *x.shape[2:])), jnp.float32) * 0.3 for n, x in row.items()}
    arrays["g"] = -jnp.abs(arrays["beta"])
    cu_seqlens = jnp.array([0, 5, 5, 11, 16])
    head = 0 if name == "key" else 1
    spoiled = arrays | {name: arrays[name].at[0, 7, head].set(jnp.inf)}
    ((got, state), gradients), ((want, final), expected) = (everything(x, cu_seqlens, schedule) for x in (spoiled, arrays))
    clean = np.r_[0:5, 11:16]
    assert not np.isfinite(got[:, 7:11]).all()
    np.testing.assert_array_equal(got[:, clean], want[:, clean])
    np.testing.assert_array_equal(got[:, :, 2:], want[:, :, 2:])  # the value heads of key head 1
    np.testing.assert_array_equal(state[np.array([0, 1, 3])], final[np.array([0, 1, 3])])
    for n, gradient in gradients.items():
        np.testing.assert_array_equal(gradient[:, clean], expected[n][:, clean])
