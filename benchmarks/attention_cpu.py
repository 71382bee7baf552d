"""Softmax attention on CPU against `jax.nn.dot_product_attention`, and its memory at 32768 tokens.

    python -m benchmarks.attention_cpu [--lengths 512,4096] [--long 32768]

float32, causal, B=1, H=8, D=64. Times are medians of calls in turn within one process; memory is what the process grows by
beyond inputs and compilation of a short call.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from ejkernel._device import default_device, describe
from ejkernel.modules import attention

HEADS, CHANNELS = 8, 64


def ours(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return attention(q, k, v, causal=True, dtype=None, return_weights=False)


def theirs(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


def with_gradient(function: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, ...]]:
    def both(q: jax.Array, k: jax.Array, v: jax.Array, d_output: jax.Array) -> tuple[jax.Array, ...]:
        output, pull = jax.vjp(function, q, k, v)
        return (output, *pull(d_output))

    return both


def inputs(length: int) -> list[jax.Array]:
    keys = jax.random.split(jax.random.key(0), 4)
    return [jax.random.normal(key, (1, length, HEADS, CHANNELS)) for key in keys]


def median_ms(function: Callable[..., object], args: list[jax.Array], seconds: float = 4.0) -> float:
    start = time.perf_counter()
    jax.block_until_ready(function(*args))
    times: list[float] = []
    while len(times) < 3 or (time.perf_counter() - start < seconds and len(times) < 50):
        begin = time.perf_counter()
        jax.block_until_ready(function(*args))
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e3


def compare(length: int) -> None:
    args = inputs(length)
    for label, wrap, count in (("forward", lambda f: f, 3), ("forward+backward", with_gradient, 4)):
        mine, reference = jax.jit(wrap(ours)), jax.jit(wrap(theirs))
        jax.block_until_ready((mine(*args[:count]), reference(*args[:count])))
        a, b = median_ms(mine, args[:count]), median_ms(reference, args[:count])
        print(f"T={length:6d}  {label:17s} ours {a:8.2f} ms   jax.nn {b:8.2f} ms   {b / a:5.2f}x", flush=True)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def memory(length: int) -> None:
    run = jax.jit(with_gradient(ours))
    jax.block_until_ready(run(*inputs(4096)))
    args = jax.block_until_ready(inputs(length))
    before, begin = peak_bytes(), time.perf_counter()
    results = jax.block_until_ready(run(*args))
    seconds, grown = time.perf_counter() - begin, peak_bytes() - before
    finite = all(bool(jnp.isfinite(x).all()) for x in results)
    print(f"T={length:6d}  forward+backward in {seconds:.1f} s, {grown / 2**20:.0f} MiB beyond the inputs, finite: {finite}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="512,1024,4096")
    parser.add_argument("--long", type=int, default=32768, help="length to measure memory at; 0: leave out")
    options = parser.parse_args()
    print(f"jax {jax.__version__} on {describe(default_device())}")
    if options.long:
        memory(options.long)  # first, while this process has not grown for anything else
    for length in map(int, options.lengths.split(",")):
        compare(length)


if __name__ == "__main__":
    main()
