"""What choosing a configuration costs a call that is already configured.

Run `python benchmarks/executor_overhead.py`; with `--check` it fails where a limit is missed: under jit no
operation more and the same program handed to XLA, eagerly at most 60 microseconds over the jitted implementation (150 with
segments), and 5 ms to pick a stored configuration in a new process. The same for calls of the library's own operations, small
enough that only starting them counts.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from ejkernel.ops import AutotunePolicy, ConfigSelectorChain, Executor, Invocation, Kernel, PersistentCache, Tuner

EAGER_LIMIT, SEGMENTS_LIMIT, DISK_LIMIT = 60e-6, 150e-6, 5e-3


@dataclass(frozen=True)
class Config:
    block: int = 64


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Problem:
    """As large an argument as an attention call's: ten arrays and five static values."""

    arrays: tuple[jax.Array, ...]
    initial_state: jax.Array | None = None
    reverse: bool = field(default=False, metadata={"static": True})
    scale: float | None = field(default=None, metadata={"static": True})
    layout: str = field(default="dense", metadata={"static": True})


class Sum(Kernel[Config, jax.Array]):
    """The sum of the arrays: an operation that costs nothing itself."""

    op_id = "overhead"

    def run(self, problem: Problem, *, platform: str | None = None, cfg: Config) -> jax.Array:
        total = problem.arrays[0]
        for array in problem.arrays[1:]:
            total = total + array
        return total

    def heuristic_cfg(self, inv: Invocation) -> Config:
        return Config()

    def candidate_cfgs(self, inv: Invocation) -> list[Config]:
        return [Config(32), Config(128)]


def arguments() -> Problem:
    return Problem(tuple(jnp.full((2, 8, 4), float(n)) for n in range(10)))


def chain(folder: str) -> ConfigSelectorChain:
    policy = AutotunePolicy(cache_miss_fallback="autotune")
    return ConfigSelectorChain(policy=policy, tuner=Tuner(1, 3), persistent=PersistentCache("overhead", folder))


def per_call(functions: list[Callable[[], object]], rounds: int = 30, calls: int = 300) -> list[float]:
    """Seconds per call of each function, the medians of rounds in which all take turns."""
    times: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, sampled in zip(functions, times, strict=True):
            start = time.perf_counter()
            for _ in range(calls):
                result = function()
            jax.block_until_ready(result)
            sampled.append((time.perf_counter() - start) / calls)
    return [statistics.median(sampled) for sampled in times]


def operations() -> dict[str, tuple[Callable[..., object], tuple[object, ...]]]:
    """Small calls by name: a function of arrays and what it is called with."""
    from ejkernel.modules import attention, gla_attention, lightning_attention, recurrent_attention
    from ejkernel.types.mask import MaskInfo

    one = jnp.ones((1, 1, 4, 32))
    row, gate = jnp.ones((8, 4, 32)), jnp.zeros((8, 4))
    offsets, scale = jnp.array([0, 3, 8], jnp.int32), jnp.float32(0.5)
    segments = MaskInfo.from_segments(jnp.zeros((1, 1), jnp.int32))
    softmax = lambda q, k, v, **options: attention(q, k, v, return_weights=False, **options)
    return {
        "recurrent": (recurrent_attention, (one, one, one)),
        "gla, a gate per key channel": (gla_attention, (one, one, one, -one)),
        "gla, packed, rank 3": (
            lambda q, k, v, g, at: gla_attention(q, k, v, g, cu_seqlens=at),
            (row, row, row, gate, offsets),
        ),
        "gla, scale as an array": (lambda *a: gla_attention(*a[:-1], softmax_scale=a[-1]), (one, one, one, scale)),
        "lightning": (lambda *a: lightning_attention(*a, layer_idx=1, num_layers=4), (one, one, one)),
        "attention, float32": (lambda *a: softmax(*a, dtype=None), (one, one, one)),
        "attention, default dtype": (softmax, (one, one, one)),
        "attention, scale as an array": (lambda *a: softmax(*a[:-1], softmax_scale=a[-1]), (one, one, one, scale)),
        "attention, segments": (lambda *a: softmax(*a[:-1], mask_info=a[-1]), (one, one, one, segments)),
    }


def pick_from_disk(folder: str) -> float:
    """Seconds to choose a stored configuration, the first thing that this process does with the library."""
    problem = arguments()
    jax.block_until_ready(problem.arrays)
    start = time.perf_counter()
    choice = Executor(chain(folder)).choose(Sum(), problem, platform=None)
    seconds = time.perf_counter() - start
    assert choice.level == "disk", choice
    return seconds


def in_new_process(folder: str) -> float:
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, sys.path)])}
    command = [sys.executable, os.path.abspath(__file__), "--pick-from", folder]
    return float(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail where a limit is missed")
    parser.add_argument("--pick-from", metavar="FOLDER", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.pick_from:
        print(pick_from_disk(options.pick_from))
        return 0
    problem, kernel = arguments(), Sum()
    direct = jax.jit(lambda problem: kernel.run(problem, cfg=Config()))
    with tempfile.TemporaryDirectory() as folder:
        executor = Executor(chain(folder))
        executor(kernel, problem, platform=None)
        plain, through = per_call([lambda: direct(problem), lambda: executor(Sum(), problem, platform=None, _cfg=None)])
        disk = statistics.median(in_new_process(folder) for _ in range(5))

    def operation(problem: Problem) -> jax.Array:
        return executor(Sum(), problem, platform=None)

    ours, theirs = jax.make_jaxpr(operation)(problem), jax.make_jaxpr(lambda p: kernel.run(p, cfg=Config()))(problem)
    more = len(ours.jaxpr.eqns) - len(theirs.jaxpr.eqns)
    operation.__name__ = "same"
    same = jax.jit(operation).lower(problem).as_text() == _named(kernel).lower(problem).as_text()
    rows = [
        ("under jit: operations more than the implementation", f"{more}", more == 0),
        ("under jit: the program handed to XLA is the same", f"{same}", same),
        ("eager: the jitted implementation", f"{plain * 1e6:.1f} us", True),
        ("eager: over it, through the executor", f"{(through - plain) * 1e6:.1f} us", through - plain <= EAGER_LIMIT),
        ("new process: picking from disk", f"{disk * 1e3:.2f} ms", disk <= DISK_LIMIT),
    ]
    for name, (function, args) in operations().items():
        jitted = jax.jit(function)
        plain, eager = per_call([lambda: jitted(*args), lambda: function(*args)], calls=100)  # noqa: B023 (used at once)
        limit = SEGMENTS_LIMIT if "segments" in name else EAGER_LIMIT
        rows.append(
            (
                f"{name}: jitted, and eager over it",
                f"{plain * 1e6:.0f} + {(eager - plain) * 1e6:.0f} us",
                eager - plain <= limit,
            )
        )
    for what, value, good in rows:
        print(f"{what:<55}{value:>15}{'' if good else '   over the limit'}")
    return 1 if options.check and not all(good for _, _, good in rows) else 0


def _named(kernel: Sum) -> jax.stages.Wrapped:
    def same(problem: Problem) -> jax.Array:
        return kernel.run(problem, cfg=Config())

    return jax.jit(same)


if __name__ == "__main__":
    sys.exit(main())
