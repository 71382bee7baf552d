"""Compiles what a GPU benchmark launches of this library, on a machine that has no GPU; nothing is measured:

    TRITON_CACHE_DIR=build/triton python -m benchmarks.ahead
    TRITON_CACHE_DIR=build/triton python -m benchmarks.ahead delta_rule_gpu --rows decode 4x4096x32x64x64

`tests.carried` brings the cache to the machine with the GPU. Inputs are zeros, and calls are traced instead of made. What
--errors launches is among it. It ends with 1 where something does not compile.
"""

from __future__ import annotations

import argparse
import collections
import os
import runpy
import sys
import time
from collections.abc import Callable
from typing import Any

# What of a benchmark is this library's, by the ways in which it is run. Of errors a row for each gate: others launch the same.
RUNS: dict[str, tuple[tuple[str, ...], ...]] = {
    "linear_attention_gpu": (("--sides", "ours"), ("--sides", "ours", "--errors", "--rows", "mild;")),
    "delta_rule_gpu": (
        ("--sides", "ours"),
        ("--sides", "ours", "--errors", "--rows", "mild unit usual;"),
        ("--decode-tiles",),
    ),
    "attention_options_gpu": (("--sides", "triton"), ("--sides", "triton", "--errors")),
    "gla_block_gpu": (("--sides", "ours"),),
    "causal_conv_gpu": ((),),
    "launch_variants_gpu": ((),),
}
WRONG_USE = 2  # argparse's
RIVALS = ("cudnn", "xla")  # sides that a benchmark runs whatever it is asked for; none of their kernels is Triton's


def zeros(key: Any, shape: Any = (), dtype: Any = float, **_: Any) -> Any:
    """In place of random numbers, which take long to draw."""
    import jax.numpy as jnp

    return jnp.zeros(shape, dtype)


def by_any_name(*_: Any) -> dict[str, Any]:
    """In place of results: one of every name that is asked for."""
    import jax.numpy as jnp

    return collections.defaultdict(lambda: jnp.zeros(1), output=jnp.zeros(1))


def prepare() -> list[str]:
    """Before a benchmark is imported: its calls are traced where they would be timed. Gives a list: what will have failed."""
    from ejkernel.testing.ahead import pretend

    pretend()
    import jax

    import benchmarks.kernel_times as kernel_times
    import ejkernel.testing.compare as compare
    import tests.triton.linear_reference as linear_reference
    from ejkernel.testing.bench_run import Run
    from ejkernel.testing.delta_cases import DeltaCase

    failed: list[str] = []

    def traced(call: Callable[[], Any], *_: Any, **__: Any) -> float:
        jax.eval_shape(call)
        return 1.0

    def only_traced(*given: Any) -> Any:
        forward, both, _ = calls_of(*given)
        return lambda: jax.eval_shape(forward), lambda: jax.eval_shape(both), lambda _: None

    def part(self: Run, side: str, measure: Any, **row: Any) -> Any:
        found = part_of(self, side, measure, **row)
        if found is None and side not in RIVALS:
            failed.append(f"{side}, {', '.join(map(str, row.values()))}")
        return found

    jax.random.normal = jax.random.uniform = zeros  # type: ignore[assignment]
    calls_of, part_of = kernel_times.jitted, Run.part
    kernel_times.jitted, kernel_times.kernel_ms, Run.part = only_traced, traced, part  # type: ignore[assignment, method-assign]
    kernel_times.named = by_any_name  # type: ignore[assignment]
    kernel_times.difference = compare.relative_rms = lambda a, b: 0.0  # type: ignore[assignment]
    # References in float64 take long, and nothing is compared with them.
    DeltaCase.expected = by_any_name  # type: ignore[assignment, method-assign]
    linear_reference.value_and_grads = lambda arrays, *_, **__: ((None, None), dict.fromkeys(arrays))
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("benchmarks", nargs="*", choices=[*RUNS, []], metavar="BENCHMARK", help=f"{', '.join(RUNS)}; all")
    parser.add_argument("--rows", nargs="*", default=[], help="as the benchmarks take them")
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    failed = prepare()
    for name in options.benchmarks or RUNS:
        begin = time.monotonic()
        for run in RUNS[name]:
            sys.argv = [name, *run, *(["--rows", *options.rows] if options.rows else [])]
            try:
                runpy.run_module(f"benchmarks.{name}", run_name="__main__")
            except SystemExit as end:  # errors of attention end with what they have shown, which is nothing here
                if end.code == WRONG_USE:
                    raise
        print(f"{name}: compiled in {time.monotonic() - begin:.0f} s", flush=True)
    if failed:
        raise SystemExit("not compiled, the reason is above: " + "; ".join(failed))


if __name__ == "__main__":
    main()
