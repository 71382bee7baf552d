"""Tune before the run, carry the result to where it runs.

    python -m examples.tune_ahead tune tuned.json      # measures configurations for a training step; writes the best to a file
    python -m examples.tune_ahead run tuned.json       # takes the file up and runs the step: nothing is measured any more

`ejkernel.ops.tune` traces a function on shapes alone, finds the operations that it calls (also inside `jit` and `grad`),
measures every candidate for each, and stores the winner. `dumps` and `loads` turn results into text and back, for a machine
of the same kind.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import jax
import jax.numpy as jnp

from ejkernel import ops
from ejkernel.modules import gla_attention

SHAPE = (2, 1024, 2, 32)  # [batch, time, heads, channels]


@jax.jit
def training_step(x: jax.Array, weights: jax.Array) -> jax.Array:
    """A step of gradient descent on a layer of gated linear attention; any function that calls operations will do."""

    def loss(weights: jax.Array) -> jax.Array:
        q, k, v, g = jnp.einsum("bthc,ncd->nbthd", x, weights)
        return jnp.mean(gla_attention(q, k, v, jax.nn.log_sigmoid(g)) ** 2)

    return weights - 0.1 * jax.grad(loss)(weights)


def shapes() -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """What the step will be called with: no array is needed to tune."""
    return jax.ShapeDtypeStruct(SHAPE, jnp.float32), jax.ShapeDtypeStruct((4, SHAPE[-1], SHAPE[-1]), jnp.float32)


# --8<-- [start:tune]
def tune(file: Path) -> ops.Report:
    """Measures what the step calls and writes the winners to a file."""
    chosen = ops.tune(training_step, *shapes())
    file.write_text(ops.dumps(), encoding="utf-8")
    return chosen


def run(file: Path) -> jax.Array:
    """Takes the winners up and runs the step with them."""
    ops.loads(file.read_text(encoding="utf-8"))
    x, weights = (jax.random.normal(jax.random.key(i), s.shape) * 0.1 for i, s in enumerate(shapes()))
    return training_step(x, weights)


# --8<-- [end:tune]


def main(action: str, file: Path) -> None:
    if action == "tune":
        print(tune(file))
        print(f"\nwritten to {file}")
    else:
        new = run(file)
        print(ops.report())
        print(f"\nran a step; the weights now have norm {float(jnp.linalg.norm(new)):.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=["tune", "run"])
    parser.add_argument("file", type=Path)
    arguments = parser.parse_args()
    if arguments.action == "run" and not arguments.file.is_file():
        parser.error(f"there is no file {arguments.file}: write it first with `tune`")
    main(arguments.action, arguments.file)
