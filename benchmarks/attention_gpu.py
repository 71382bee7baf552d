"""Softmax attention on an NVIDIA GPU: right, and as fast as calling cuDNN directly.

    python -m benchmarks.attention_gpu [--others]

bf16, causal. Times are per launch over many launches in a row, the best of several rounds in turn; errors are relative RMS
against float32 on a few heads. `--others` adds what `auto` falls back to: blockwise xla at several tile sizes, masks,
packed sequences, decoding.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._attention import AttentionConfig
from ejkernel.modules.base import default_executor
from ejkernel.modules.operations.attention import Attention, attention
from ejkernel.testing.compare import relative_rms
from ejkernel.types.mask import MaskInfo

SHAPES = [(8, 2048, 16, 128), (4, 4096, 32, 64), (1, 16384, 16, 128)]
LIMIT = 6e-3


def ours(q: jax.Array, k: jax.Array, v: jax.Array, **options: Any) -> jax.Array:
    return attention(q, k, v, **({"causal": True, "return_weights": False} | options))


def cudnn(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")


def with_gradient(function: Callable[..., jax.Array]) -> Callable[..., tuple[jax.Array, ...]]:
    def both(q: jax.Array, k: jax.Array, v: jax.Array, d_output: jax.Array) -> tuple[jax.Array, ...]:
        output, pull = jax.vjp(function, q, k, v)
        return (output, *pull(d_output))

    return both


def inputs(shape: tuple[int, int, int, int]) -> list[jax.Array]:
    return [jax.random.normal(key, shape, jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 4)]


def launch_ms(functions: dict[str, Callable[..., Any]], args: list[jax.Array], rounds: int = 8) -> dict[str, float]:
    """Milliseconds per launch of each function: the best round of launches in a row, rounds taken in turn."""
    best = dict.fromkeys(functions, float("inf"))
    for function in functions.values():
        jax.block_until_ready(function(*args))
    begin = time.perf_counter()
    jax.block_until_ready(next(iter(functions.values()))(*args))
    launches = max(5, min(200, int(0.15 / (time.perf_counter() - begin))))
    for _ in range(rounds):
        for name, function in functions.items():
            begin, result = time.perf_counter(), None
            for _ in range(launches):
                result = function(*args)
            jax.block_until_ready(result)
            best[name] = min(best[name], (time.perf_counter() - begin) / launches * 1e3)
    return best


def errors(shape: tuple[int, int, int, int]) -> dict[str, float]:
    """Relative RMS of output and gradients against float32, on one row and two heads of the whole call."""
    args = inputs(shape)
    got = jax.jit(with_gradient(ours))(*args)
    few = [x[:1, :, :2].astype(jnp.float32) for x in args]
    want = jax.jit(with_gradient(lambda q, k, v: ours(q, k, v, dtype=None, platform="xla")))(*few)
    names = ("output", "query", "key", "value")
    picked = [np.asarray(x[:1, :, :2].astype(jnp.float32)) for x in got]
    return {name: relative_rms(x, np.asarray(y)) for name, x, y in zip(names, picked, want, strict=True)}


def compare(shape: tuple[int, int, int, int]) -> bool:
    batch, length, heads, channels = shape
    args = inputs(shape)
    choice = default_executor().choose(Attention(), *args[:3], causal=True, return_weights=False)
    found = errors(shape)
    right = max(found.values()) < LIMIT
    print(f"{shape}: auto runs {choice.config.platform}; errors " + ", ".join(f"{n} {e:.1e}" for n, e in found.items()))
    for label, wrap, count, work in (("forward", lambda f: f, 3, 2), ("forward+backward", with_gradient, 4, 7)):
        times = launch_ms({"ours": jax.jit(wrap(ours)), "cudnn": jax.jit(wrap(cudnn))}, args[:count])
        rate = work * batch * heads * length * length * channels / times["ours"] / 1e9
        print(
            f"  {label:17s} ours {times['ours']:.4f} ms   cuDNN {times['cudnn']:.4f} ms   "
            f"ours/cuDNN {times['ours'] / times['cudnn']:.3f}   {rate:.0f} TFLOP/s",
            flush=True,
        )
    return right


def others() -> None:
    """What runs where cuDNN's causal kernel does not."""
    shape = (8, 2048, 16, 128)
    args = inputs(shape)
    edges = np.linspace(0, shape[1], 5).astype(np.int32)
    ids = np.repeat(np.arange(4, dtype=np.int32), np.diff(edges))[None].repeat(shape[0], 0)
    runs: dict[str, Callable[..., Any]] = {
        f"xla blockwise {n}": jax.jit(
            with_gradient(lambda q, k, v, n=n: ours(q, k, v, cfg=AttentionConfig(block_q=n, block_k=n, platform="xla")))
        )
        for n in (256, 512, 1024)
    }
    runs["cuda, key mask"] = jax.jit(with_gradient(lambda *x: ours(*x, attention_mask=jnp.ones(shape[:2], bool))))
    known: Any = ids  # of numpy, whose values are known in a trace
    runs["cuda, known segments"] = jax.jit(with_gradient(lambda *x: ours(*x, mask_info=MaskInfo.from_segments(known))))
    for name, run in runs.items():
        print(f"{shape} forward+backward, {name}: {launch_ms({name: run}, args, rounds=2)[name]:.3f} ms", flush=True)
    q = args[0][:, :1]
    for platform in ("cuda", "xla"):
        decode = jax.jit(lambda q, k, v, platform=platform: ours(q, k, v, causal=False, platform=platform))
        print(f"one query, {shape[1]} keys, {platform}: {launch_ms({platform: decode}, [q, *args[1:3]])[platform]:.4f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--others", action="store_true")
    options = parser.parse_args()
    print(f"jax {jax.__version__} on {jax.devices()[0].device_kind}")
    results = [compare(shape) for shape in SHAPES]
    if options.others:
        others()
    print("all right" if all(results) else "WRONG RESULTS")
    raise SystemExit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
