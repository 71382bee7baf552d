"""Softmax attention with its options on a GPU: the triton platform beside cuDNN's plain causal call and FlexAttention.

    python -m benchmarks.attention_options_gpu [--json FILE] [--rows TEXT ...] [--sides triton cudnn flex auto xla]
    python -m benchmarks.attention_options_gpu --errors                  errors against float32, beside cuDNN's plain call
    python -m benchmarks.attention_options_gpu --tiles forward|query|key [--rows TEXT] [--try 128,64,8,3 ...]
    python -m benchmarks.attention_options_gpu --together 1 4 8 16 [--rows TEXT]         heads that are computed at one time
    TRITON_INTERPRET=1 python -m benchmarks.attention_options_gpu --tiny --sides triton cudnn auto xla          on a CPU

bf16, causal. Times are kernel times: CUPTI's durations of every kernel that a call launches, summed, for all sides by the same
profiler (torch's), in one run. FlexAttention is compiled by torch with its own default tiles, and has the same option.
`ejkernel.testing.bench_run` says how a run that was cut off goes on. `--tiles` measures one kernel alone with other tiles
(queries, keys, warps, stages), `--together` each with another order of its programs. `--tiny` runs every row once for a few
tokens, by the clock, to see that it does.
"""

from __future__ import annotations

import argparse
import functools
import os
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory beside it

import jax
import jax.numpy as jnp
import numpy as np

import ejkernel
from benchmarks.attention_rows import (
    OPTIONS,
    SIDES,
    WINDOW,
    Row,
    arguments,
    inputs,
    on_triton,
    ours,
    rows,
    with_gradient,
)
from benchmarks.kernel_times import BANDWIDTH, kernel_ms
from ejkernel.testing.bench_run import Run
from ejkernel.testing.compare import relative_rms
from ejkernel.types.mask import MaskInfo

NONE = float("nan")  # of a side that cannot run a row
ERRORS_SHAPE, TINY_ERRORS = (1, 1024, 4, 128), (1, 64, 2, 16)
TILES = {
    "forward": ["128,128,8,2", "128,64,8,2", "128,64,8,3", "128,64,4,2", "64,64,4,2", "64,64,4,3", "64,128,4,2", "128,32,4,3"],
    "query": ["128,64,8,2", "128,64,8,1", "128,32,8,3", "64,64,4,2", "64,64,4,1", "128,128,8,1", "64,128,4,1", "128,64,4,2"],
    "key": ["64,128,8,2", "64,128,8,1", "32,128,8,2", "32,128,8,3", "64,64,4,2", "64,64,4,1", "128,128,8,1", "32,64,4,3"],
}  # fmt: skip


def wait(result: Any) -> None:
    """Until a result of JAX, or of torch, is there."""
    leaves = [x for x in jax.tree.leaves(result) if isinstance(x, jax.Array)]
    if leaves:
        jax.block_until_ready(leaves)
    else:
        import torch

        torch.cuda.synchronize()


def clock_ms(call: Callable[[], Any], _: Any) -> float:
    """Of one call, the first: what a tiny run shows."""
    begin = time.perf_counter()
    jax.block_until_ready(call())
    return (time.perf_counter() - begin) * 1e3


def decode(run: Run, measure: Callable[..., float], tiny: bool) -> None:
    """64 sequences, 32 query and 8 key heads of 128, 8192 keys: beside the bytes of the cache."""
    B, S, H, HK, D = (2, 64, 4, 2, 16) if tiny else (64, 8192, 32, 8, 128)
    floor = 2 * B * S * HK * D * 2 / BANDWIDTH * 1e3

    def of(given: Any) -> dict[str, Any]:
        q = jax.random.normal(jax.random.key(0), (B, 1, H, D), jnp.bfloat16)
        k, v = (jax.random.normal(jax.random.key(n), (B, S, HK, D), jnp.bfloat16) for n in (1, 2))
        attend = functools.partial(on_triton, return_weights=False, dtype=None)
        step = jax.jit(lambda q, k, v, info: attend(q, k, v, mask_info=info))
        return {"ms": [measure(functools.partial(step, q, k, v, given), wait)]}

    info = MaskInfo.from_segments(jnp.zeros((B, 1), jnp.int32), jnp.zeros((B, S), jnp.int32))
    for label, given in (("plain", None), ("kv lengths", info)):
        if (line := run.part("triton", functools.partial(of, given), call=f"decode, {label}")) is not None:
            ms = line["ms"][0]
            print(f"decode, {label}: {ms:.4f} ms, byte floor {floor:.4f}, ratio {ms / floor:.2f}", flush=True)


def table(run: Run, chosen: list[Row], sides: list[str], measure: Callable[..., float]) -> None:
    """Times of every side, and the first side's over each other's: forward, then forward + backward."""
    first, *others = sides
    each = [first, *(cell for name in others for cell in (name, f"{first} / {name}"))]
    print("| call | " + " | ".join([*each, *(f"{cell}, with gradient" for cell in each)]) + " |")
    print("|---" * (1 + 2 * len(each)) + "|")
    for row in chosen:
        of = lambda side, row=row: {"ms": [measure(call, wait) for call in SIDES[side](row)]}
        # cuDNN's is the plain call of the shape, whatever the option.
        name = lambda side, row=row: str(row if side != "cudnn" or row.lengths else Row(row.shape, "none"))
        lines = {side: run.part(side, functools.partial(of, side), call=name(side)) for side in sides}
        found = {side: [NONE, NONE] if line is None else line["ms"] for side, line in lines.items()}
        cells = []
        for n in range(2):
            cells.append(f"{found[first][n]:.3f}")
            cells += [f"{found[side][n]:.3f} | {found[first][n] / found[side][n]:.2f}" for side in others]
        print(f"| {row} | {' | '.join(cells)} |", flush=True)


def errors(run: Run, shape: tuple[int, int, int, int]) -> bool:
    """Relative RMS of output and gradients against float32 xla on the same inputs; cuDNN's plain call beside it."""
    names, right = ("output", "query", "key", "value", "softmax_aux", "bias"), True
    print("| option | side | output | dquery | dkey | dvalue | dsinks | dbias |\n" + "|---" * 8 + "|")
    for option in (*OPTIONS, f"cap, window {WINDOW}"):
        if not run.asks_for(option):
            continue
        row = Row(shape, option)
        want = functools.cache(functools.partial(_wanted, row))
        for side in ("triton", "cudnn") if option == "none" else ("triton",):
            measure = functools.partial(_errors_of, side, row, want)
            if (line := run.part(side, measure, what="errors", option=option)) is None:
                right = False
                continue
            found = line["errors"]
            right &= max(found.values()) < 6e-3
            cells = " | ".join(f"{found[n]:.1e}" if n in found else "-" for n in names)
            print(f"| {option} | {side} | {cells} |", flush=True)
    return right


def _wanted(row: Row) -> dict[str, jax.Array]:
    q, k, v, do = inputs(row.shape)
    arrays, others, options = arguments(row)
    run = lambda q, k, v, arrays: ejkernel.attention(q, k, v, **arrays, **others, **options, platform="xla")
    return _named(jax.jit(with_gradient(run))(_wide(do), *map(_wide, (q, k, v)), jax.tree.map(_wide, arrays)))


def _errors_of(side: str, row: Row, want: Callable[[], dict[str, jax.Array]]) -> dict[str, Any]:
    result = SIDES[side](row)[1]()
    got, exact = _named(result[0] if side == "cudnn" else result), want()
    return {"errors": {n: relative_rms(np.asarray(_wide(got[n])), np.asarray(exact[n])) for n in exact if n in got}}


def _wide(x: jax.Array) -> jax.Array:
    return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _named(result: Any) -> dict[str, jax.Array]:
    output, (query, key, value, *rest) = result
    return {"output": output, "query": query, "key": key, "value": value, **(rest[0] if rest else {})}


def sweep(kernel: str, row: Row, tried: list[str]) -> None:
    """Times of one kernel with other tiles."""
    from ejkernel.kernels._triton.attention import _plan

    table, wide = _plan.HALF, max(64, row.shape[3])
    usual = table[wide]
    for text in tried:
        table[wide] = usual._replace(**{kernel: _plan.Tiles(*map(int, text.split(",")))})
        try:
            call = ours(row)[0 if kernel == "forward" else 1]
            wait(call())
            ms = kernel_ms_of(call, {"forward": "flash_forward"}.get(kernel, f"flash_{kernel}_gradient"))
            print(f"{row} {kernel} {text}: {ms:.4f} ms", flush=True)
        except Exception as error:  # tiles that do not fit
            print(f"{row} {kernel} {text}: {type(error).__name__}: {str(error)[:120]}", flush=True)
    table[wide] = usual


def orders(row: Row, tried: list[int]) -> None:
    """Times of each kernel with other numbers of heads that are computed at one time."""
    from ejkernel.kernels._triton.attention import _plan

    usual = _plan.heads_together
    for heads in tried:
        _plan.heads_together = functools.partial(lambda heads, _: heads, heads)
        call = ours(row)[1]
        parts = {name: kernel_ms_of(call, f"flash_{name}") for name in ("forward", "query", "key", "bias")}
        parts["all"] = kernel_ms(call, wait)
        print(f"{row} together {heads}: " + ", ".join(f"{name} {ms:.4f}" for name, ms in parts.items()), flush=True)
    _plan.heads_together = usual


def kernel_ms_of(call: Callable[[], Any], name: str, repeats: int = 10) -> float:
    """Milliseconds of one kernel per call, by CUPTI."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    for _ in range(2):
        wait(call())
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            result = call()
        wait(result)
        torch.cuda.synchronize()
    return sum(e.time_range.elapsed_us() for e in profiler.events() if name in e.name) / repeats / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    Run.add_options(parser, rows="name")
    parser.add_argument("--sides", nargs="+", choices=list(SIDES), default=["triton", "cudnn", "flex"], help="who runs them")
    parser.add_argument("--tiny", action="store_true", help="a few tokens, by the clock")
    parser.add_argument("--errors", action="store_true", help="errors instead of times")
    parser.add_argument("--tiles", choices=list(TILES), help="one kernel with other tiles instead")
    parser.add_argument("--together", type=int, nargs="+", help="other numbers of heads at one time instead")
    parser.add_argument("--try", dest="tried", nargs="*", help="tiles to try: queries,keys,warps,stages")
    options = parser.parse_args()
    run = Run(options)
    chosen = [row for row in rows(options.tiny) if run.asks_for(str(row))]
    if options.errors:
        raise SystemExit(0 if errors(run, TINY_ERRORS if options.tiny else ERRORS_SHAPE) else "WRONG RESULTS")
    if options.together:
        for row in chosen:
            orders(row, options.together)
        return
    if options.tiles:
        for row in chosen:
            sweep(options.tiles, row, options.tried or TILES[options.tiles])
        return
    measure = clock_ms if options.tiny else kernel_ms
    if run.asks_for("decode"):
        decode(run, measure, options.tiny)
    if chosen:
        table(run, chosen, options.sides, measure)


if __name__ == "__main__":
    main()
