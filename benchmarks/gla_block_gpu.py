"""A training step of a gated-linear-attention block on a GPU: on the triton platform and on jax-linear-attention, in one run.

    python -m benchmarks.gla_block_gpu [--batch 8] [--sides ours jla] [--json block.jsonl] [--seconds-in-all S] [--kernels]
    python -m benchmarks.gla_block_gpu --plot block.jsonl picture.png
    python -m benchmarks.gla_block_gpu --tiny                            tries the script, on any device

The block: RMS norm; projections to query, key, value, an output gate and, over 16 channels, the log decays; gated linear
attention in bfloat16 with 24 heads of 128 at T = 4096; RMS norm of each head, the output gate, the output projection, the
residual. The step: the loss, the gradient of every parameter, an update of them in float32; with `jax.checkpoint` around the
block, or without, when what the backward pass needs is kept. Both sides run the same step but for the attention itself.

Times are kernel times (see `kernel_times`). The attention's part is measured on the attention alone, with the block's shapes:
forward and backward, with `jax.checkpoint` one more forward pass.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.kernel_times import difference, jitted, kernel_ms, print_kernels
from ejkernel.modules import recurrent_attention
from ejkernel.testing import jax_linear
from ejkernel.testing.bench_run import Run
from ejkernel.testing.results import read

Attend = Callable[..., jax.Array]  # of query, key, value [B, T, H, D] and gk by name
Parameters = dict[str, jax.Array]
Measured = tuple[dict[str, Any], Callable[[], Parameters]]
LOW_RANK = 16  # channels that the log decays are projected over
RATE = 1e-3
NAMES = {"ours": "ejkernel", "jla": "jax-linear-attention"}


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Of a block; its width is that of all heads."""

    batch: int
    time: int = 4096
    heads: int = 24
    channels: int = 128

    @property
    def width(self) -> int:
        return self.heads * self.channels

    @property
    def rows(self) -> tuple[int, int, int, int]:
        return self.batch, self.time, self.heads, self.channels


def parameters(sizes: Sizes) -> Parameters:
    D, keys = sizes.width, iter(jax.random.split(jax.random.key(0), 8))
    matrix = lambda n, m: jax.random.normal(next(keys), (n, m), jnp.float32) / math.sqrt(n)
    found = {name: matrix(D, D) for name in ("query", "key", "value", "gate", "output")}
    return found | {
        "decay_in": matrix(D, LOW_RANK), "decay_out": matrix(LOW_RANK, D), "norm": jnp.ones(D),
        "head_norm": jnp.ones(sizes.channels),
    }  # fmt: skip


def rms_norm(x: jax.Array, weight: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6) * weight).astype(x.dtype)


def block(attend: Attend, sizes: Sizes, weights: Parameters, x: jax.Array) -> jax.Array:
    """[B, T, width] to the same."""
    w = {name: p.astype(jnp.bfloat16) for name, p in weights.items() if p.ndim == 2}
    y = rms_norm(x, weights["norm"])
    query, key, value = ((y @ w[name]).reshape(sizes.rows) for name in ("query", "key", "value"))
    gk = jax.nn.log_sigmoid(y @ w["decay_in"] @ w["decay_out"]).reshape(sizes.rows) / 16
    o = rms_norm(attend(query=query, key=key, value=value, gk=gk), weights["head_norm"])
    return x + (o.reshape(x.shape) * jax.nn.silu(y @ w["gate"])) @ w["output"]


def step_of(attend: Attend, sizes: Sizes, checkpoint: bool) -> Callable[[Parameters, jax.Array], tuple[Parameters, jax.Array]]:
    """(parameters, x) to (new parameters, loss)."""
    run: Callable[..., jax.Array] = functools.partial(block, attend, sizes)
    if checkpoint:
        run = jax.checkpoint(run)

    def loss(weights: Parameters, x: jax.Array) -> jax.Array:
        return jnp.mean(run(weights, x).astype(jnp.float32) ** 2)

    @jax.jit
    def step(weights: Parameters, x: jax.Array) -> tuple[Parameters, jax.Array]:
        value, grads = jax.value_and_grad(loss)(weights, x)
        return jax.tree.map(lambda p, g: p - RATE * g, weights, grads), value

    return step


def ours(tiny: bool) -> Attend:
    if tiny:
        return recurrent_attention
    from ejkernel.kernels._triton import recurrent

    return lambda **arrays: recurrent(**arrays)[0]


@functools.cache
def attention_ms(attend: Attend, sizes: Sizes) -> tuple[float, float]:
    """(forward, forward + backward) of the attention alone, on arrays as the block makes them."""
    keys = jax.random.split(jax.random.key(1), 5)
    normal = lambda key: jax.random.normal(key, sizes.rows, jnp.float32).astype(jnp.bfloat16)
    arrays = {name: normal(key) for name, key in zip(("query", "key", "value", "gk"), keys, strict=False)}
    arrays["gk"] = jax.nn.log_sigmoid(arrays["gk"]) / 16
    forward, both, wait = jitted(lambda arrays: attend(**arrays), arrays, normal(keys[4]))
    return kernel_ms(forward, wait), kernel_ms(both, wait)


def batch_of(sizes: Sizes) -> jax.Array:
    """What goes into the block."""
    return jax.random.normal(jax.random.key(2), (sizes.batch, sizes.time, sizes.width), jnp.float32).astype(jnp.bfloat16)


def updated_once(attend: Attend, sizes: Sizes, checkpoint: bool) -> Parameters:
    """The parameters after one step."""
    return step_of(attend, sizes, checkpoint)(parameters(sizes), batch_of(sizes))[0]


def measured(attend: Attend, sizes: Sizes, checkpoint: bool, kernels: bool) -> Measured:
    """The times of a way, and what makes the parameters after one step."""
    forward, both = attention_ms(attend, sizes)
    step = step_of(attend, sizes, checkpoint)
    call = functools.partial(step, parameters(sizes), batch_of(sizes))
    found = {"step": kernel_ms(call, jax.block_until_ready), "attention": both + forward * checkpoint}
    if kernels:
        print_kernels(call, jax.block_until_ready)
    return {**found, "sizes": dataclasses.asdict(sizes)}, lambda: call()[0]


def apart(mine: Parameters, theirs: Parameters, before: Parameters) -> float:
    """The largest relative RMS difference between two sides' updates."""
    return max(float(difference(theirs[n] - before[n], mine[n] - before[n])) for n in before)


def plot(source: str, target: str) -> None:
    """A bar for each row: the attention's part of the step, and the rest."""
    import matplotlib.pyplot as plt

    rows = [line for line in read(source) if "step" in line]
    figure, axes = plt.subplots(figsize=(9, 0.55 * len(rows) + 1.4), layout="constrained")
    colours = {"ours": "tab:blue", "jla": "tab:orange"}
    for place, row in enumerate(rows):
        axes.barh(place, row["attention"], color=colours[row["side"]])
        axes.barh(place, row["step"] - row["attention"], left=row["attention"], color="0.85")
        share = f"{row['attention']:.2f} ms, {row['attention'] / row['step']:.0%} of {row['step']:.2f}"
        axes.annotate(share, (row["step"], place), (5, 0), textcoords="offset points", va="center", fontsize=9)
    way = {True: "jax.checkpoint", False: "all kept"}
    axes.set_yticks(range(len(rows)), [f"{NAMES[row['side']]}, {way[row['checkpoint']]}" for row in rows])
    axes.invert_yaxis()
    axes.set_xlim(right=1.4 * max(row["step"] for row in rows))
    axes.set_xlabel("ms of kernels in a training step; coloured: the attention, grey: projections, norms, update")
    size = rows[0]["sizes"]
    shape = f"B = {size['batch']}, T = {size['time']}, {size['heads']} heads of {size['channels']}"
    axes.set_title(f"A GLA block, {shape}, {rows[0]['device']}", fontsize=10)
    figure.savefig(target, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    Run.add_options(parser, rows="'checkpoint on' or 'checkpoint off'")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--sides", nargs="+", default=list(NAMES), choices=list(NAMES))
    parser.add_argument("--kernels", action="store_true", help="the longest kernels of each step")
    parser.add_argument("--tiny", action="store_true", help="64 tokens, ours on any platform: to try this script")
    parser.add_argument("--plot", nargs=2, metavar=("RESULTS", "PICTURE"), help="draw a picture of earlier results")
    options = parser.parse_args()
    if options.plot:
        plot(*options.plot)
        return
    sizes = Sizes(1, 64, 2, 16) if options.tiny else Sizes(options.batch)
    run, updates = Run(options), dict[bool, Parameters]()
    sides = {"ours": ours(options.tiny), "jla": jax_linear.linear()}
    print("| side | jax.checkpoint | step, ms | attention, ms | its part | updates differ from ours by |\n" + "|---" * 6 + "|")

    def measure(side: str, checkpoint: bool) -> dict[str, Any]:
        found, updated = measured(sides[side], sizes, checkpoint, options.kernels)
        if side == "ours" and len(options.sides) > 1:
            updates[checkpoint] = updated()
        elif side != "ours" and "ours" in options.sides:
            mine = updates.get(checkpoint) or updated_once(sides["ours"], sizes, checkpoint)
            found["differs by"] = apart(mine, updated(), parameters(sizes))
        return found

    for side in run.runnable(options.sides, {"jla": jax_linear.missing}):
        for checkpoint in (False, True):
            on = "on" if checkpoint else "off"
            if not run.asks_for(f"checkpoint {on}"):
                continue
            if (row := run.part(side, functools.partial(measure, side, checkpoint), checkpoint=checkpoint)) is not None:
                differs = f"{row['differs by']:.1e}" if "differs by" in row else "-"
                part = f"{row['attention'] / row['step']:.0%} | {differs}"
                print(f"| {side} | {on} | {row['step']:.3f} | {row['attention']:.3f} | {part} |", flush=True)


if __name__ == "__main__":
    main()
