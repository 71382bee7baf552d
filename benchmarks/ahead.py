"""Compiles what a GPU benchmark launches of this library, on a machine that has no GPU; nothing is measured:

    TRITON_CACHE_DIR=build/triton python -m benchmarks.ahead linear_attention_gpu delta_rule_gpu attention_options_gpu
    TRITON_CACHE_DIR=build/triton python -m benchmarks.ahead gla_block_gpu causal_conv_gpu

`tests.carried` brings the cache to the machine with the GPU. Inputs are zeros, and calls are traced instead of made.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
import time
from collections.abc import Callable
from typing import Any

OWN = {  # what of a benchmark is this library's
    "linear_attention_gpu": ("--sides", "ours"),
    "delta_rule_gpu": ("--sides", "ours"),
    "attention_options_gpu": ("--sides", "triton"),
    "gla_block_gpu": ("--sides", "ours"),
    "causal_conv_gpu": (),
}


def zeros(key: Any, shape: Any = (), dtype: Any = float, **_: Any) -> Any:
    """In place of random numbers, which take long to draw."""
    import jax.numpy as jnp

    return jnp.zeros(shape, dtype)


def prepare() -> None:
    """Before a benchmark is imported: its calls are traced where they would be timed, and give zeros."""
    from ejkernel.testing.ahead import pretend

    pretend()
    import jax
    import jax.numpy as jnp

    import benchmarks.kernel_times as kernel_times

    def traced(call: Callable[[], Any], *_: Any, **__: Any) -> float:
        jax.eval_shape(call)
        return 1.0

    def only_traced(*given: Any) -> Any:
        forward, both, wait = calls_of(*given)
        return lambda: jax.eval_shape(forward), lambda: jax.eval_shape(both), wait

    jax.random.normal = jax.random.uniform = zeros  # type: ignore[assignment]
    calls_of = kernel_times.jitted
    kernel_times.jitted, kernel_times.kernel_ms = only_traced, traced  # type: ignore[assignment]
    kernel_times.named = lambda result: {"output": jnp.zeros(1)}  # after the times: how far sides are apart


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("benchmarks", nargs="+", choices=list(OWN))
    parser.add_argument("--rows", nargs="*", default=[""], help="as the benchmarks take them")
    options = parser.parse_args()
    os.environ["JAX_PLATFORMS"] = "cpu"
    prepare()
    for name in options.benchmarks:
        begin = time.monotonic()
        sys.argv = [name, *OWN[name], "--rows", *options.rows]
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
        print(f"{name}: compiled in {time.monotonic() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
