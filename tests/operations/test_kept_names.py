"""What gradients start from has names: under `jax.checkpoint` with a policy that keeps them, no forward pass runs again."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax.extend.core import jaxprs_in_params
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from ejkernel._device import Device, on_device
from ejkernel.kernels._cuda import attention as cuda_attention
from ejkernel.modules import (
    AttentionConfig,
    attention,
    gated_delta_rule,
    gla_attention,
    lightning_attention,
    recurrent_attention,
)

NAMES = "recurrence_output", "recurrence_states", "attention_output", "attention_sums"
PROJECTIONS = 4  # made again in any case: the gradient needs query, key, value and gate
Call = Callable[..., jax.Array]
RECURRENCES: dict[str, Call] = {
    "recurrent": lambda q, k, v, g, **options: recurrent_attention(q, k, v, gk=g, return_state=True, **options)[0],
    "gla": lambda q, k, v, g, **options: gla_attention(q, k, v, g[..., 0], **options),
    "lightning": lambda q, k, v, g, **options: lightning_attention(q, k, v + g, layer_idx=1, num_layers=3, **options),
    "delta": lambda q, k, v, g, **options: gated_delta_rule(q, k, v, jax.nn.sigmoid(v[..., 0]), g, **options),
}


def operations(function: Callable[..., Any], *args: Any) -> collections.Counter[str]:
    """How often each operation stands in a trace, with all that it calls."""
    found: collections.Counter[str] = collections.Counter()

    def count(jaxpr: Any) -> None:
        for equation in jaxpr.eqns:
            found[equation.primitive.name] += 1
            for inner in jaxprs_in_params(equation.params):
                count(inner)

    count(jax.make_jaxpr(function)(*args).jaxpr)
    return found


def check(call: Call, *heavy: str) -> None:
    """Of the heavy operations none is done again if the names are kept, and some are if nothing is."""
    x, w = jnp.ones((1, 96, 2, 16)), jnp.ones((4, 16, 16))

    def layer(w: jax.Array) -> jax.Array:
        q, k, v, g = (jnp.tanh(x @ each) for each in w)
        return jnp.sum(jnp.sin(call(q, k, v, -g * g)))

    policy = jax.checkpoint_policies.save_only_these_names(*NAMES)
    once, kept, again = (
        operations(jax.grad(f), w) for f in (layer, jax.checkpoint(layer, policy=policy), jax.checkpoint(layer))
    )
    count = lambda found: {name: found[name] for name in heavy if found[name]}
    assert count(once), once
    assert count(kept) == count(once)
    assert sum(count(again).values()) > sum(count(once).values())
    assert kept["dot_general"] <= once["dot_general"] + PROJECTIONS, "only the projections are made again"


@pytest.mark.parametrize("operation", RECURRENCES)
def test_recurrences(operation):
    check(RECURRENCES[operation], "linear_map", "scan", "while")


@pytest.mark.parametrize("operation", RECURRENCES)
def test_along_a_sequence_axis(operation):
    mesh = AbstractMesh((2,), ("time",), axis_types=(AxisType.Auto,))
    local = functools.partial(RECURRENCES[operation], sequence_axis="time")
    split = PartitionSpec(None, "time")
    call = jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=split)
    check(call, "linear_map", "scan", "while", "all_gather")


def test_attention():
    blocks = AttentionConfig("blockwise", 32, 32)
    check(lambda q, k, v, g: attention(q, k, v + g, causal=True, return_weights=False, dtype=None, cfg=blocks), "linear_map")


@pytest.mark.parametrize("operation", [*RECURRENCES, "attention"])
def test_on_triton(operation):
    pytest.importorskip("triton", reason="the triton platform needs Triton")
    soft: Call = lambda q, k, v, g, **options: attention(q, k, v + g, return_weights=False, dtype=None, **options)
    with on_device(Device("gpu", "NVIDIA H200", 90)):
        check(functools.partial((RECURRENCES | {"attention": soft})[operation], platform="triton"), "interpreted_triton_kernel")


def test_on_cuda(monkeypatch):
    """What cuDNN keeps is inside an operation of JAX's, which a policy keeps whole."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91000)
    x, forward = jnp.ones((1, 64, 2, 32), jnp.bfloat16), "dot_product_attention_fwd_wrapper"
    names = jax.checkpoint_policies.save_only_these_names(*NAMES)
    policy = lambda primitive, *args, **params: primitive.name == forward or names(primitive, *args, **params)

    def layer(x: jax.Array) -> jax.Array:
        x = jnp.tanh(x)
        return jnp.sum(jnp.sin(cuda_attention(x, x, x, dtype=None)[0]))

    with on_device(Device("gpu", "NVIDIA H200", 90)):
        kept, again = (operations(jax.grad(jax.checkpoint(layer, policy=how)), x)[forward] for how in (policy, names))
    assert (kept, again) == (1, 2)
