"""The gated delta rule against the hand-written scan and its autodiff on a CPU, as ratios in one run.

    python -m benchmarks.delta_rule_cpu

float32, B = 2, H = 4, K = V = 64, keys of length 1. Forward computes the output; forward+backward the output and the gradients
of all inputs. Memory is what XLA plans for a program beside its arguments and results.
"""

from __future__ import annotations

import datetime
import platform
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules import gated_delta_rule
from ejkernel.testing.hand_written import scan_delta_rule
from ejkernel.testing.timing import best_times, directed

Arrays = dict[str, jax.Array]
GATES = ("none", "per head", "per key channel")
LENGTHS = (512, 2048, 8192)


def inputs(tokens: int, gate: str, batch: int = 2) -> tuple[Arrays, jax.Array]:
    """(arrays, adjoint of the output)."""
    keys = iter(jax.random.split(jax.random.key(0), 8))
    normal = lambda *shape: jax.random.normal(next(keys), (batch, tokens, 4, *shape))
    unit = lambda x: x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    arrays = {"query": unit(normal(64)), "key": unit(normal(64)), "value": normal(64), "beta": jax.nn.sigmoid(normal())}
    if gate != "none":
        arrays["g"] = jax.nn.log_sigmoid(normal(*([64] if gate == "per key channel" else []))) / 4
    return arrays, normal(64)


def megabytes(function: Callable[..., Any], *args: Any) -> float:
    """What a program needs beside its arguments and results."""
    return jax.jit(function).lower(*args).compile().memory_analysis().temp_size_in_bytes / 1e6


def main() -> None:
    print(f"{datetime.date.today()}, {platform.machine()} CPU, jax {jax.__version__}, Python {platform.python_version()}\n")
    print("| T | gate | direction | scan, ms | ejkernel, ms | times faster | scan, MB | ejkernel, MB |\n" + "|---" * 8 + "|")
    ours = lambda **arrays: gated_delta_rule(**arrays, platform="xla")
    for tokens in LENGTHS:
        for gate in GATES:
            arrays, cotangent = inputs(tokens, gate)
            for direction in ("forward", "forward+backward") if tokens == 8192 else ("forward",):
                sides = {"ours": directed(ours, direction), "scan": directed(lambda **a: scan_delta_rule(**a)[0], direction)}
                took = best_times(sides, arrays, cotangent, seconds=3)
                memory = {name: megabytes(side, arrays, cotangent) for name, side in sides.items()}
                print(
                    f"| {tokens} | {gate} | {direction} | {took['scan'] * 1e3:.1f} | {took['ours'] * 1e3:.1f} | "
                    f"{took['scan'] / took['ours']:.1f} | {memory['scan']:.0f} | {memory['ours']:.0f} |",
                    flush=True,
                )
    print("\n| time per token at T=65536 over T=2048 | wanted | measured |\n|---|---|---|")
    for gate in GATES:
        each = {}
        for tokens in (2048, 65536):
            arrays, _ = inputs(tokens, gate, batch=1)
            each[tokens] = best_times({"t": lambda a: ours(**a)}, arrays, seconds=2)["t"] / tokens
        print(f"| {gate} | <= 1.3 | {each[65536] / each[2048]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
