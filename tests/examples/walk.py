"""What a new user does after reading the README, as a program: a layer of one's own, packed rows, four devices.

Run by `test_walk.py` in a process of its own, since the number of simulated devices is settled when JAX starts.
"""

from __future__ import annotations

import os

if __name__ == "__main__":  # collecting doctests imports this file, too
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=1"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import ejkernel

WIDTH, HEADS, VOCABULARY, TOKENS, ROWS = 16, 2, 13, 32, 4
Params = dict[str, jax.Array]


def init(key: jax.Array) -> Params:
    shapes = {"embedding": (VOCABULARY, WIDTH), "qkvg": (WIDTH, 4 * WIDTH), "out": (WIDTH, WIDTH)}
    keys = jax.random.split(key, len(shapes))
    return {name: jax.random.normal(k, s) * s[-1] ** -0.5 for k, (name, s) in zip(keys, shapes.items(), strict=True)}


def row_loss(params: Params, tokens: jax.Array, offsets: jax.Array) -> jax.Array:
    """The loss of one packed row `[TOKENS]`."""
    x = params["embedding"][tokens]
    q, k, v, g = (y.reshape(TOKENS, HEADS, -1) for y in jnp.split(x @ params["qkvg"], 4, -1))
    o = ejkernel.gla_attention(q, k, v, jax.nn.log_sigmoid(g) / 16, cu_seqlens=offsets)
    logits = jax.nn.log_softmax((x + o.reshape(x.shape) @ params["out"]) @ params["embedding"].T)
    counts = jnp.ones(TOKENS).at[offsets[1:] - 1].set(0)
    return -jnp.sum(jnp.take_along_axis(logits, jnp.roll(tokens, -1)[:, None], -1)[:, 0] * counts) / counts.sum()


@jax.jit
def step(params: Params, tokens: jax.Array, offsets: jax.Array) -> tuple[Params, jax.Array]:
    mean = lambda params: jax.vmap(row_loss, (None, 0, 0))(params, tokens, offsets).mean()
    loss, gradients = jax.value_and_grad(mean)(params)
    return jax.tree.map(lambda x, d: x - 0.5 * d, params, gradients), loss


def batch(number: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(number)
    cuts = np.sort(rng.integers(1, TOKENS, (ROWS, 3)), axis=1)
    offsets = np.pad(cuts, ((0, 0), (1, 0))).astype(np.int32)
    return np.cumsum(rng.integers(0, 2, (ROWS, TOKENS)), 1) % VOCABULARY, np.insert(offsets, 4, TOKENS, axis=1)


def main() -> None:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    params = init(jax.random.key(0))
    alone, _ = step(params, *batch(0))
    split, _ = step(params, *(jax.device_put(x, rows) for x in batch(0)))
    for name, want in alone.items():
        np.testing.assert_allclose(split[name], want, rtol=0, atol=1e-5)
    losses = []
    for number in range(100):
        params, loss = step(params, *(jax.device_put(x, rows) for x in batch(number)))
        losses.append(float(loss))
    assert losses[-1] < losses[0] - 0.5, losses
    print(f"{losses[0]:.2f} -> {losses[-1]:.2f}")


if __name__ == "__main__":
    main()
