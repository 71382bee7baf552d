"""A language model's training step over a mesh: rows of the batch over one axis, time over the other.

`python -m examples.several_devices` trains a few steps on 8 simulated devices, 2 for the batch and 4 for time. With `--plot` it
draws the memory that one device needs against the sequence's length.
"""

from __future__ import annotations

import argparse
import functools
import os
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

from ejkernel.modules import attention, gla_attention
from ejkernel.types.mask import MaskInfo

Array = jax.Array
Params = dict[str, Any]
P = PartitionSpec
TOKENS = P("data", "time")
HEADS = 4


# --8<-- [start:recipe]
def causal_attention(query: Array, key: Array, value: Array, axis: str, segment_ids: Array | None = None) -> Array:
    """Softmax attention where time is split over a mesh axis: keys and values are gathered, queries say where they stand.

    `attention` counts positions from a shard's own first token, so without the positions a later shard would see too little.

    Args:
        segment_ids: [B, T] of packed documents, which may cross shards; the ids of one row differ, and -1 is padding.
    """
    everyone = lambda x: lax.all_gather(x, axis, axis=1, tiled=True)  # [B, all tokens, ...]
    T = query.shape[1]
    ids = jnp.zeros(query.shape[:2], jnp.int32) if segment_ids is None else segment_ids
    positions = jnp.broadcast_to(lax.axis_index(axis) * T + jnp.arange(T), ids.shape)
    info = MaskInfo.from_segments(ids, everyone(ids), positions, everyone(positions))
    return attention(query, everyone(key), everyone(value), mask_info=info, causal=True, dtype=None, return_weights=False)


# --8<-- [end:recipe]


def init(key: Array, vocabulary: int, width: int, layers: tuple[str, ...]) -> Params:
    """`layers`: "linear" or "softmax" each."""
    keys = iter(jax.random.split(key, 2 + 4 * len(layers)))
    normal = lambda *shape: jax.random.normal(next(keys), shape) * shape[0] ** -0.5
    blocks = [
        {
            "qkv": normal(width, 3 * width),
            "gate": normal(width, width),
            "out": normal(width, width),
            "mlp": normal(width, width),
        }
        for _ in layers
    ]
    return {"embed": normal(vocabulary, width), "blocks": blocks, "head": normal(width, vocabulary)}


def norm(x: Array) -> Array:
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def mixed(block: Params, kind: str, x: Array, axis: str | None) -> Array:
    """One layer's mixing of tokens; axis: the mesh axis that time is split over, None where each call has whole sequences."""
    by_head = lambda y: y.reshape(*y.shape[:2], HEADS, -1)
    q, k, v = map(by_head, jnp.split(norm(x) @ block["qkv"], 3, -1))
    if kind == "linear":
        g = jax.nn.log_sigmoid(by_head(norm(x) @ block["gate"]) + 3) / 4  # one log decay per key channel
        o = gla_attention(q, k, v, g, sequence_axis=axis)
    elif axis is None:
        o = attention(q, k, v, causal=True, dtype=None, return_weights=False)
    else:
        o = causal_attention(q, k, v, axis)
    return o.reshape(x.shape) @ block["out"]


def losses(params: Params, tokens: Array, targets: Array, layers: tuple[str, ...], axis: str | None) -> Array:
    """The sum of the tokens' losses."""
    x = params["embed"][tokens]
    for block, kind in zip(params["blocks"], layers, strict=True):
        layer = lambda x, block=block, kind=kind: x + mixed(block, kind, x, axis)
        x = jax.checkpoint(layer)(x)
        x = x + jax.nn.silu(norm(x) @ block["mlp"])
    logits = jax.nn.log_softmax(norm(x) @ params["head"])
    return -jnp.sum(jnp.take_along_axis(logits, targets[..., None], -1))


# --8<-- [start:step]
def split_loss(params: Params, tokens: Array, targets: Array, *, mesh: Mesh, layers: tuple[str, ...]) -> Array:
    """The mean loss; every device computes its rows and its stretch of time."""

    def local(params: Params, tokens: Array, targets: Array) -> Array:
        return lax.psum(losses(params, tokens, targets, layers, "time"), ("data", "time"))

    total = jax.shard_map(local, mesh=mesh, in_specs=(P(), TOKENS, TOKENS), out_specs=P())(params, tokens, targets)
    return total / tokens.size


def step(params: Params, tokens: Array, targets: Array, *, mesh: Mesh, layers: tuple[str, ...]) -> tuple[Params, Array]:
    """One step down the gradient, which is that of the whole sequences."""
    loss, grads = jax.value_and_grad(functools.partial(split_loss, mesh=mesh, layers=layers))(params, tokens, targets)
    return jax.tree.map(lambda x, d: x - 0.1 * d, params, grads), loss


# --8<-- [end:step]


def make_mesh(data: int, time: int) -> Mesh:
    devices = jax.devices()[: data * time]
    return jax.make_mesh((data, time), ("data", "time"), axis_types=(AxisType.Auto,) * 2, devices=devices)


def text(key: Array, rows: int, length: int, vocabulary: int) -> tuple[Array, Array]:
    """Random walks: what comes next is near what came last."""
    steps = jax.random.randint(key, (rows, length + 1), 0, 3)
    walk = jnp.cumsum(steps, 1) % vocabulary
    return walk[:, :-1], walk[:, 1:]


def train(mesh: Mesh, layers: tuple[str, ...], steps: int, length: int, width: int = 32, vocabulary: int = 16) -> list[float]:
    """The losses of some steps."""
    params = init(jax.random.key(0), vocabulary, width, layers)
    run = jax.jit(functools.partial(step, mesh=mesh, layers=layers))
    found = []
    for number in range(steps):
        params, loss = run(params, *text(jax.random.key(number), 2, length, vocabulary))
        found.append(float(loss))
    return found


def memory(length: int, time: int, width: int = 64) -> float:
    """MB that one device needs beside parameters for a step on one sequence, time split over `time` devices."""
    layers, mesh = ("linear", "linear"), make_mesh(1, time)
    params = jax.eval_shape(functools.partial(init, vocabulary=256, width=width, layers=layers), jax.random.key(0))
    tokens = jax.ShapeDtypeStruct((1, length), jnp.int32)
    compiled = jax.jit(functools.partial(step, mesh=mesh, layers=layers)).lower(params, tokens, tokens).compile()
    found = compiled.memory_analysis()
    assert found is not None, "this backend does not say what memory a program needs"
    return found.temp_size_in_bytes / 1e6


def plot(path: Path, lengths: tuple[int, ...] = (2048, 4096, 8192, 16384)) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    for devices in (1, 8):
        of = [length * devices for length in lengths] if devices > 1 else lengths
        every = sorted({*lengths, *of})
        found = [memory(length, devices) for length in every]
        axes.plot(every, found, marker="o", label=f"{devices} device{'s' if devices > 1 else ''}")
        print(f"{devices} devices:", ", ".join(f"{n} tokens {mb:.0f} MB" for n, mb in zip(every, found, strict=True)))
    axes.set(xscale="log", yscale="log", xlabel="tokens of the sequence", ylabel="MB on each device, one training step")
    axes.set_xticks([2048 << i for i in range(7)], [f"{2 << i}k" for i in range(7)])
    axes.minorticks_off()
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--plot", type=Path, help="where to draw the memory of a device against the length")
    given = parser.parse_args(arguments)
    layers = ("linear", "softmax", "linear")
    found = train(make_mesh(2, 4), layers, given.steps, given.length)
    print("2 x 4 devices:", ", ".join(f"{loss:.3f}" for loss in found))
    if given.plot is not None:
        plot(given.plot)


if __name__ == "__main__":
    main()
