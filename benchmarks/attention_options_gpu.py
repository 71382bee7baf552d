"""Softmax attention with its options on a GPU: the triton platform beside cuDNN's plain causal call and FlexAttention.

    python -m benchmarks.attention_options_gpu [--json results.json] [--rows TEXT ...] [--no-flex]
    python -m benchmarks.attention_options_gpu --errors                  errors against float32, beside cuDNN's plain call
    python -m benchmarks.attention_options_gpu --tiles forward|query|key [--rows TEXT] [--try 128,64,8,3 ...]

bf16, causal. Times are kernel times: CUPTI's durations of every kernel that a call launches, summed, for all sides by the same
profiler (torch's), in one run. FlexAttention is compiled by torch with its own default tiles, and has the same option where it
has such an option. `--tiles` measures one kernel alone with other tiles (queries, keys, warps, stages).
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import json
import os
import sys
from collections.abc import Callable
from typing import Any

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch needs memory beside it

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.linear_attention_gpu import BANDWIDTH, kernel_ms
from ejkernel.kernels._triton import attention
from ejkernel.testing.compare import relative_rms
from ejkernel.testing.linear_gpu import LENGTHS
from ejkernel.types.mask import MaskInfo

SHAPES = [(8, 2048, 16, 128), (2, 8192, 16, 128), (4, 4096, 32, 64)]
CAP, WINDOW = 50.0, 512
OPTIONS = ("none", "cap", "sinks", "mask", "bias")
TILES = {
    "forward": ["128,128,8,2", "128,64,8,2", "128,64,8,3", "128,64,4,2", "64,64,4,2", "64,64,4,3", "64,128,4,2", "128,32,4,3"],
    "query": ["128,64,8,2", "128,64,8,1", "128,32,8,3", "64,64,4,2", "64,64,4,1", "128,128,8,1", "64,128,4,1", "128,64,4,2"],
    "key": ["64,128,8,2", "64,128,8,1", "32,128,8,2", "32,128,8,3", "64,64,4,2", "64,64,4,1", "128,128,8,1", "32,64,4,3"],
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Row:
    """One call: a shape and an option."""

    shape: tuple[int, int, int, int]
    option: str

    def __str__(self) -> str:
        return f"{'x'.join(map(str, self.shape))} {self.option}"


def rows() -> list[Row]:
    found = [Row(shape, option) for shape in SHAPES for option in OPTIONS]
    found += [Row((2, T, 16, 128), f"cap, window {WINDOW}") for T in (4096, 8192, 16384)]
    return [*found, Row((1, sum(LENGTHS), 16, 128), "packed")]


def inputs(shape: tuple[int, int, int, int]) -> list[jax.Array]:
    """query, key, value and the adjoint of the output."""
    return [jax.random.normal(key, shape, jnp.bfloat16) for key in jax.random.split(jax.random.key(0), 4)]


def arguments(row: Row) -> tuple[dict[str, jax.Array], dict[str, Any], dict[str, Any]]:
    """(arrays that gradients are taken of beside query, key and value; other arrays; options)."""
    B, T, H, _ = row.shape
    arrays: dict[str, jax.Array] = {}
    others: dict[str, Any] = {}
    options: dict[str, Any] = {"causal": True, "return_weights": False, "dtype": None}
    if row.option == "sinks":
        arrays["softmax_aux"] = jnp.linspace(-1.0, 1.0, H)[:, None]
    if row.option == "bias":
        arrays["bias"] = jax.random.normal(jax.random.key(5), (1, H, T, T), jnp.bfloat16)
    if row.option == "mask":
        others["attention_mask"] = jax.random.bernoulli(jax.random.key(6), 0.9, (B, 1, T, T))
    if row.option == "packed":
        others["mask_info"] = MaskInfo.from_cu_seqlens(jnp.asarray(np.concatenate([[0], np.cumsum(LENGTHS)]), jnp.int32))
    if "cap" in row.option:
        options["logits_soft_cap"] = CAP
    if "window" in row.option:
        options["sliding_window"] = (WINDOW, 0)
    return arrays, others, options


def with_gradient(function: Callable[..., Any]) -> Callable[..., Any]:
    """`(output, gradients of all arguments)` from `(d_output, *args)`."""

    def both(d_output: jax.Array, *args: Any) -> Any:
        output, pull = jax.vjp(function, *args)
        return output, pull(d_output)

    return both


def ours(row: Row, platform: Callable[..., Any] = attention) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """(forward, forward + backward)."""
    q, k, v, do = inputs(row.shape)
    arrays, others, options = arguments(row)

    def run(others: dict[str, Any], q: jax.Array, k: jax.Array, v: jax.Array, arrays: dict[str, jax.Array]) -> jax.Array:
        return platform(q, k, v, **arrays, **others, **options)[0]

    forward = jax.jit(run)
    both = jax.jit(lambda others, do, *args: with_gradient(functools.partial(run, others))(do, *args))
    return lambda: forward(others, q, k, v, arrays), lambda: both(others, do, q, k, v, arrays)


def cudnn(shape: tuple[int, int, int, int]) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """cuDNN's plain causal call; of the packed row, one for each document."""
    run = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    forward, both = jax.jit(run), jax.jit(with_gradient(run))
    packed = shape[1] == sum(LENGTHS)
    each = [inputs((1, n + n % 2, *shape[2:])) for n in LENGTHS] if packed else [inputs(shape)]
    return lambda: [forward(*x[:3]) for x in each], lambda: [both(x[3], *x[:3]) for x in each]


def flex(row: Row) -> tuple[Callable[[], Any], Callable[[], Any]] | None:
    """FlexAttention with the same option; None where it has none."""
    if row.option not in ("none", "cap", f"cap, window {WINDOW}"):
        return None
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    B, T, H, D = row.shape
    q, k, v = (torch.randn(B, H, T, D, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    do = torch.randn_like(q)
    window = WINDOW if "window" in row.option else T

    def cap(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return CAP * torch.tanh(score / CAP)

    def seen(b: Any, h: Any, i: Any, j: Any) -> Any:
        return (i >= j) & (i - j <= window)

    mask = create_block_mask(seen, None, None, T, T)
    compiled = torch.compile(flex_attention)
    run = functools.partial(compiled, score_mod=cap if "cap" in row.option else None, block_mask=mask)

    def forward() -> Any:
        with torch.no_grad():
            return run(q, k, v)

    def both() -> Any:
        out = run(q, k, v)
        return out, torch.autograd.grad(out, (q, k, v), do)

    return forward, both


def wait(result: Any) -> None:
    """Until a result of JAX, or of torch, is there."""
    leaves = [x for x in jax.tree.leaves(result) if isinstance(x, jax.Array)]
    if leaves:
        jax.block_until_ready(leaves)
    else:
        import torch

        torch.cuda.synchronize()


def times(make: Callable[[], Any]) -> tuple[float, float]:
    """(forward, forward + backward) in milliseconds; NaN where a side cannot run it."""
    try:
        found = make()
        return (float("nan"),) * 2 if found is None else (kernel_ms(found[0], wait), kernel_ms(found[1], wait))
    except Exception as error:  # a side that cannot run a row must not take the table with it
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return (float("nan"),) * 2


def decode() -> None:
    """64 sequences, 32 query and 8 key heads of 128, 8192 keys: beside the bytes of the cache."""
    q = jax.random.normal(jax.random.key(0), (64, 1, 32, 128), jnp.bfloat16)
    k, v = (jax.random.normal(jax.random.key(n), (64, 8192, 8, 128), jnp.bfloat16) for n in (1, 2))
    info = MaskInfo.from_segments(jnp.zeros((64, 1), jnp.int32), jnp.zeros((64, 8192), jnp.int32))
    floor = 2 * k.size * 2 / BANDWIDTH * 1e3
    for label, given in (("plain", None), ("kv lengths", info)):
        run = jax.jit(lambda q, k, v, info: attention(q, k, v, mask_info=info, return_weights=False, dtype=None)[0])
        ms = kernel_ms(functools.partial(run, q, k, v, given), wait)
        print(f"decode, {label}: {ms:.4f} ms, byte floor {floor:.4f}, ratio {ms / floor:.2f}", flush=True)


def errors() -> bool:
    """Relative RMS of output and gradients against float32 xla on the same inputs; cuDNN's plain call beside it."""
    from ejkernel.kernels._xla import attention as on_xla

    shape, right = (1, 1024, 4, 128), True
    names = ("output", "query", "key", "value", "softmax_aux", "bias")
    print("| option | side | output | dquery | dkey | dvalue | dsinks | dbias |\n" + "|---" * 8 + "|")
    for option in (*OPTIONS, f"cap, window {WINDOW}"):
        row = Row(shape, option)
        wide = lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x
        q, k, v, do = inputs(shape)
        arrays, others, options = arguments(row)
        run = lambda q, k, v, arrays, others=others, options=options: on_xla(q, k, v, **arrays, **others, **options)[0]
        want = _named(jax.jit(with_gradient(run))(wide(do), *map(wide, (q, k, v)), jax.tree.map(wide, arrays)))
        sides = {"triton": _named(ours(row)[1]())}
        if option == "none":
            output, grads = cudnn(shape)[1]()[0]
            sides["cuDNN"] = _named((output, grads))
        for side, got in sides.items():
            found = {name: relative_rms(np.asarray(wide(got[name])), np.asarray(want[name])) for name in names if name in got}
            right &= max(found.values()) < 6e-3
            print(
                f"| {option} | {side} | " + " | ".join(f"{found[n]:.1e}" if n in found else "-" for n in names) + " |",
                flush=True,
            )
    return right


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
    parser.add_argument("--json", help="where the numbers go")
    parser.add_argument("--rows", nargs="*", default=[""], help="only rows whose name contains one of these")
    parser.add_argument("--no-flex", action="store_true", help="leave FlexAttention out, which takes long to compile")
    parser.add_argument("--errors", action="store_true", help="errors instead of times")
    parser.add_argument("--tiles", choices=list(TILES), help="one kernel with other tiles instead")
    parser.add_argument("--try", dest="tried", nargs="*", help="tiles to try: queries,keys,warps,stages")
    options = parser.parse_args()
    chosen = [row for row in rows() if any(text in str(row) for text in options.rows)]
    if options.errors:
        raise SystemExit(0 if errors() else "WRONG RESULTS")
    if options.tiles:
        for row in chosen:
            sweep(options.tiles, row, options.tried or TILES[options.tiles])
        return
    decode()
    print("| call | ours fwd | cuDNN plain | ratio | Flex | ratio | ours fwd+bwd | cuDNN plain | ratio | Flex | ratio |")
    print("|---" * 11 + "|")
    results, plain = [], {}
    for row in chosen:
        mine = times(functools.partial(ours, row))
        if row.shape not in plain:
            plain[row.shape] = times(functools.partial(cudnn, row.shape))
        other = (float("nan"),) * 2 if options.no_flex else times(functools.partial(flex, row))
        sides = zip(mine, plain[row.shape], other, strict=True)
        cells = [f"{a:.3f} | {b:.3f} | {a / b:.2f} | {c:.3f} | {a / c:.2f}" for a, b, c in sides]
        print(f"| {row} | {' | '.join(cells)} |", flush=True)
        results.append({"row": str(row), "ours": mine, "cudnn": plain[row.shape], "flex": other})
        if options.json:  # after every row: what is measured is kept if a later row fails
            with open(options.json, "w") as file:
                json.dump({"rows": results, "device": jax.devices()[0].device_kind}, file, indent=1)
        gc.collect()


if __name__ == "__main__":
    main()
