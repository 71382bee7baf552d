"""attention under jit, vmap, checkpoint, scan, shard_map, forward mode; empty and tiny shapes."""

from __future__ import annotations

import functools
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._attention import AttentionConfig
from ejkernel.modules import attention
from ejkernel.types.mask import MaskInfo

CONFIGS = [AttentionConfig("direct"), AttentionConfig(block_q=8, block_k=8)]
both_schedules = pytest.mark.parametrize("cfg", CONFIGS, ids=["direct", "blockwise"])
close = functools.partial(np.testing.assert_allclose, atol=2e-5)


def arrays(*lead: int, length: int = 20):
    keys = jax.random.split(jax.random.key(0), 3)
    return tuple(jax.random.normal(k, (*lead, length, heads, 8)) for k, heads in zip(keys, (4, 2, 2), strict=True))


def call(cfg, **options):
    return lambda q, k, v: attention(q, k, v, dtype=None, causal=True, return_weights=False, cfg=cfg, **options)


def gradients(fun):
    return jax.grad(lambda *args: (fun(*args) ** 2).sum(), (0, 1, 2))


@both_schedules
def test_jit_is_the_same(cfg):
    args = arrays(2)
    close(jax.jit(call(cfg))(*args), call(cfg)(*args))


@both_schedules
def test_vmap(cfg):
    args = arrays(3, 2)
    mapped = jax.vmap(gradients(call(cfg)))(*args)
    for n in range(3):
        for got, want in zip(mapped, gradients(call(cfg))(*(x[n] for x in args)), strict=True):
            close(got[n], want)


@both_schedules
def test_vmap_over_some_arguments_only(cfg):
    q, k, v = arrays(2)
    qs = jnp.stack([q, q * 2])
    mapped = jax.vmap(call(cfg), (0, None, None))(qs, k, v)
    close(mapped[1], call(cfg)(q * 2, k, v))


def test_vmap_over_segments():
    q, k, v = arrays(1)
    ids = jnp.array([[[0] * 9 + [1] * 11], [[0] * 3 + [1] * 4 + [-1] * 13]])

    def run(ids, cfg):
        return gradients(call(cfg, mask_info=MaskInfo.from_segments(ids)))(q, k, v)

    got, want = (jax.vmap(functools.partial(run, cfg=cfg))(ids) for cfg in reversed(CONFIGS))
    jax.tree.map(close, got, want)


@both_schedules
def test_checkpoint_and_scan(cfg):
    q, k, v = arrays(2)

    def layers(q):
        return jax.lax.scan(lambda x, _: (jax.checkpoint(call(cfg))(x, k, v), None), q, None, length=3)[0]

    x = q
    for _ in range(3):
        x = call(cfg)(x, k, v)
    close(layers(q), x)
    unrolled = jax.grad(lambda q: call(cfg)(call(cfg)(call(cfg)(q, k, v), k, v), k, v).sum())(q)
    close(jax.jit(jax.grad(lambda q: layers(q).sum()))(q), unrolled)


def everything(cfg, q, k, v, bias, sinks, scale):
    """A call with all that has a gradient, packed and with dropout; the second sequence is padding."""
    return attention(
        q, k, v, bias, jax.random.key(5), sinks, mask_info=MaskInfo.from_segments(jnp.array([[0] * 7 + [-1] * 2 + [1] * 4])),
        causal=True, deterministic=False, dropout_prob=0.3, logits_soft_cap=2.0, softmax_scale=scale, dtype=None,
        return_weights=False, cfg=cfg,
    )  # fmt: skip


@both_schedules
def test_forward_mode_equals_reverse_mode(cfg):
    args = (*arrays(1, length=13), jnp.sin(jnp.arange(13.0)), jnp.array([0.3, -jnp.inf]), jnp.float32(0.4))
    tangents = jax.tree.map(lambda x: jnp.cos(3 * jnp.where(jnp.isfinite(x), x, 0)), args)
    function = functools.partial(everything, cfg)
    output, moved = jax.jit(lambda *t: jax.jvp(function, args, t))(*tangents)
    pulled = jax.vjp(function, *args)[1](jnp.sin(output))
    reverse = sum(jnp.vdot(x, y) for x, y in zip(pulled, tangents, strict=True))
    np.testing.assert_allclose(jnp.vdot(jnp.sin(output), moved), reverse, rtol=1e-4)


def test_derivatives_of_derivatives_are_those_of_the_direct_schedule():
    args = (*arrays(1, length=13), jnp.sin(jnp.arange(13.0)), jnp.array([0.3, -0.2]), jnp.float32(0.4))
    tangents = jax.tree.map(lambda x: jnp.cos(3 * x), args)
    every = tuple(range(len(args)))

    def second(cfg, args, reverse):
        slopes = jax.grad(lambda *args: jnp.sum(jnp.sin(everything(cfg, *args))), every)
        if not reverse:
            return jax.jvp(slopes, args, tangents)[1]
        along = lambda *args: sum(jnp.vdot(x, y) for x, y in zip(slopes(*args), tangents, strict=True))
        return jax.grad(along, every)(*args)

    want = jax.jit(functools.partial(second, CONFIGS[0], reverse=False))(args)
    for reverse in (False, True):
        got = jax.jit(functools.partial(second, CONFIGS[1], reverse=reverse))(args)
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), got, want)


@both_schedules
@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (5, 0), (1, 9), (9, 1), (17, 16)])
def test_lengths(cfg, q_len, kv_len):
    q, k, v = jnp.ones((2, q_len, 4, 8)), jnp.ones((2, kv_len, 2, 8)), jnp.ones((2, kv_len, 2, 8))
    output, weights = attention(q, k, v, dtype=None, cfg=cfg)
    assert (output.shape, weights.shape) == ((2, q_len, 4, 8), (2, 4, q_len, kv_len))
    np.testing.assert_allclose(output, 1.0 if kv_len else 0.0, rtol=1e-6)
    for gradient, x in zip(gradients(lambda *a: attention(*a, dtype=None, cfg=cfg)[0])(q, k, v), (q, k, v), strict=True):
        assert gradient.shape == x.shape
        assert np.all(np.isfinite(gradient))


def test_an_empty_batch():
    q = jnp.ones((0, 5, 4, 8))
    for cfg in CONFIGS:
        assert attention(q, q, q, cfg=cfg)[0].shape == (0, 5, 4, 8)


SHARDED = """
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import PartitionSpec as P
from ejkernel.kernels._attention import AttentionConfig
from ejkernel.modules import attention

mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
keys = jax.random.split(jax.random.key(0), 3)
q, k, v = (jax.random.normal(key, (4, 20, heads, 8)) for key, heads in zip(keys, (4, 2, 2)))
bias, sinks = jax.random.normal(jax.random.key(9), (1, 4, 20, 20)), jnp.ones((4, 1))
for cfg in (AttentionConfig("direct"), AttentionConfig(block_q=8, block_k=8)):
    def run(q, k, v, bias, sinks, scale):
        return attention(q, k, v, bias, softmax_aux=sinks, causal=True, dtype=None, return_weights=False,
                         softmax_scale=scale, cfg=cfg)
    specs = (P("x"), P("x"), P("x"), P(), P(), P())
    sharded = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=P("x"))
    loss = lambda f: lambda *args: (f(*args) ** 2).sum()
    args = (q, k, v, bias, sinks, jnp.float32(0.3))
    got, want = (jax.jit(jax.grad(loss(f), tuple(range(6))))(*args) for f in (sharded, run))
    for x, y in zip(got, want):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-4)
print("same")
"""


@pytest.mark.long
def test_shard_map():
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, "-c", SHARDED],
        env={**os.environ, **environment, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.stdout.strip() == "same", done.stderr[-3000:]


def test_forward_mode_of_many_directions_equals_reverse_mode():
    """More than 2^15 scores, which one direction of a test's size does not have."""
    query, key, value = (jax.random.normal(jax.random.key(i), (2, 6, heads, 3)) for i, heads in enumerate((4, 2, 2)))

    def loss(query):
        output, weights = attention(query, key, value, causal=True, dtype=None, platform="xla", cfg=AttentionConfig("direct"))
        return output.sum() + (weights**2).sum()

    np.testing.assert_allclose(jax.jacfwd(loss)(query), jax.grad(loss)(query), atol=1e-5)
