"""Gated linear attention on a GPU: the triton platform beside flash-linear-attention, in one run on one machine.

    python -m benchmarks.linear_attention_gpu [--json results.json] [--ours-only] [--rows TEXT]
    python -m benchmarks.linear_attention_gpu --prewarm 3 14               compiles a share of both sides' kernels, for speed

Times are kernel times: CUPTI's durations of every kernel that a call launches, summed, over back-to-back calls, for both
sides by the same profiler (torch's). Flash-linear-attention's tuning is cleared between shapes. Its scalar-gate backward
refuses to run on Hopper with Triton 3.4 to 3.7.0; that guard is switched off here, as a speed mark only.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._triton.recurrent import recurrent

Arrays = dict[str, jax.Array]
BANDWIDTH = 4.3e12  # bytes a second, a device-to-device copy on an H200
SHAPES = {
    "8x2048x16x128x128": (8, 2048, 16, 128, 128),
    "1x16384x16x128x128": (1, 16384, 16, 128, 128),
    "4x4096x32x64x64": (4, 4096, 32, 64, 64),
    "8x4096x4x256x512": (8, 4096, 4, 256, 512),
    "packed 32768x16x128x128": (1, 32768, 16, 128, 128),
}
LENGTHS = (96, 4100, 777, 2048, 300, 5000, 64, 1500, 3333, 12, 4095, 2500, 1800, 6000, 900, 243)  # 16 sequences, 32768 tokens
KINDS = ("gk", "g", "g_gamma", "none")


def rows() -> list[tuple[str, str]]:
    """(shape, kind of gate) of every row."""
    out = [(name, kind) for name in SHAPES for kind in KINDS]
    skipped = {("8x4096x4x256x512", "g_gamma"), ("8x4096x4x256x512", "none"), ("packed 32768x16x128x128", "none")}
    return [row for row in out if row not in skipped] + [("8x2048x16x128x128", "gk+gv")]


def inputs(name: str, kind: str) -> tuple[Arrays, jax.Array, np.ndarray | None]:
    """(arrays, adjoint of the output, cu_seqlens)."""
    B, T, H, K, V = SHAPES[name]
    keys = iter(jax.random.split(jax.random.key(0), 8))
    normal = lambda *shape: jax.random.normal(next(keys), shape, jnp.float32)
    mild = lambda *shape: jax.nn.log_sigmoid(normal(*shape)) / 16
    arrays = {"query": normal(B, T, H, K), "key": normal(B, T, H, K), "value": normal(B, T, H, V)}
    arrays |= {"gk": mild(B, T, H, K)} if "gk" in kind else {}
    arrays |= {"gv": mild(B, T, H, V)} if "gv" in kind else {}
    arrays = {n: x.astype(jnp.bfloat16) for n, x in arrays.items()}
    if kind == "g":
        arrays["g"] = mild(B, T, H)
    if kind == "g_gamma":
        arrays["g_gamma"] = -jnp.linspace(0.01, 0.3, H)
    do = normal(B, T, H, V).astype(jnp.bfloat16)
    cu = np.concatenate([[0], np.cumsum(LENGTHS)]).astype(np.int32) if name.startswith("packed") else None
    return arrays, do, cu


def ours(name: str, kind: str) -> tuple[Callable[[], Any], Callable[[], Any], Callable[[Any], None]]:
    """(forward, forward + backward, wait). g_gamma is a constant of the layer, as it is for flash-linear-attention."""
    arrays, do, cu = inputs(name, kind)
    cu_seqlens = None if cu is None else jnp.asarray(cu)
    gamma = {n: arrays.pop(n) for n in ("g_gamma",) if n in arrays}
    run = lambda arrays: recurrent(**arrays, **gamma, cu_seqlens=cu_seqlens)[0]
    forward = jax.jit(run)

    @jax.jit
    def both(arrays: Arrays, do: jax.Array) -> Any:
        out, pull = jax.vjp(run, arrays)
        return out, pull(do)

    return lambda: forward(arrays), lambda: both(arrays, do), jax.block_until_ready


def theirs(name: str, kind: str) -> tuple[Callable[[], Any], Callable[[], Any], Callable[[Any], None]]:
    import torch

    forget_tuning()
    import fla.ops.common.chunk_o as chunk_o
    from fla.ops.gla import chunk_gla, fused_recurrent_gla
    from fla.ops.simple_gla import chunk_simple_gla

    chunk_o.IS_NVIDIA_HOPPER = False  # the guard: a speed mark only
    arrays, do, cu = inputs(name, kind)
    tensors = {n: torch.from_dlpack(x).clone() for n, x in arrays.items()}
    q, k, v = (tensors[n].requires_grad_() for n in ("query", "key", "value"))
    leaves = [q, k, v]
    packed = {} if cu is None else {"cu_seqlens": torch.tensor(cu, device="cuda", dtype=torch.long)}
    if kind == "gk+gv":
        leaves += [tensors["gk"].requires_grad_(), tensors["gv"].requires_grad_()]
        forward = lambda: fused_recurrent_gla(q, k, v, gk=leaves[3], gv=leaves[4], **packed)[0]
    elif kind == "gk":
        leaves.append(tensors["gk"].requires_grad_())
        forward = lambda: chunk_gla(q, k, v, leaves[3], **packed)[0]
    else:
        if kind == "g":
            leaves.append(tensors["g"].requires_grad_())
        gate = {"g": leaves[3]} if kind == "g" else {"g_gamma": tensors["g_gamma"]} if kind == "g_gamma" else {}
        forward = lambda: chunk_simple_gla(q, k, v, **gate, **packed)[0]
    adjoint = torch.from_dlpack(do).clone()

    def no_grad() -> Any:
        with torch.no_grad():
            return forward()

    return no_grad, lambda: torch.autograd.grad(forward(), leaves, adjoint), lambda _: torch.cuda.synchronize()


def forget_tuning() -> None:
    """Clears what every Triton autotuner in the process has learnt."""
    from triton.runtime.autotuner import Autotuner

    for thing in gc.get_objects():
        if isinstance(thing, Autotuner):
            thing.cache.clear()


def kernel_ms(call: Callable[[], Any], wait: Callable[[Any], None], repeats: int = 20) -> float:
    """Milliseconds of kernels per call, by CUPTI."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    for _ in range(3):
        wait(call())
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            result = call()
        wait(result)
        torch.cuda.synchronize()
    total = sum(e.time_range.elapsed_us() for e in profiler.events() if e.device_type == torch.autograd.DeviceType.CUDA)
    return total / repeats / 1e3


def wall_ms(call: Callable[[], Any], wait: Callable[[Any], None], repeats: int = 30) -> float:
    """Milliseconds per call on the host's clock, calls back to back: an upper bound on the kernels' time."""
    wait(call())
    begin = time.perf_counter()
    for _ in range(repeats):
        result = call()
    wait(result)
    return (time.perf_counter() - begin) / repeats * 1e3


def floor_ms(name: str, kind: str) -> tuple[float, float]:
    """Compulsory bytes over bandwidth: (forward, forward + backward)."""
    arrays, do, _ = jax.eval_shape(lambda: (*inputs(name, kind)[:2], 0))
    size = lambda xs: sum(x.size * x.dtype.itemsize for x in xs)
    forward = size(arrays.values()) + size([do])
    return forward / BANDWIDTH * 1e3, (2 * forward + size(arrays.values())) / BANDWIDTH * 1e3


def decode_ms() -> tuple[float, float]:
    """(one decode step with 128 sequences and 16 heads of 128 x 128, its byte floor)."""
    B, H, K = 128, 16, 128
    x = [jax.random.normal(jax.random.key(i), (B, 1, H, K), jnp.float32).astype(jnp.bfloat16) for i in range(3)]
    gk = -jnp.abs(x[0])
    step = jax.jit(lambda q, k, v, gk, S: recurrent(q, k, v, gk=gk, initial_state=S), donate_argnums=4)
    state = [jnp.zeros((B, H, K, K), jnp.float32)]

    def call() -> Any:
        out, state[0] = step(*x, gk, state[0])
        return out

    return kernel_ms(call, jax.block_until_ready), 2 * B * H * K * K * 4 / BANDWIDTH * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="where the numbers go")
    parser.add_argument(
        "--ours-only", action="store_true", help="leave the other library out (its tuning takes a minute a row)"
    )
    parser.add_argument("--rows", default="", help="only rows whose shape or gate contains this")
    parser.add_argument("--prewarm", nargs=2, type=int, metavar=("SHARE", "SHARES"))
    options = parser.parse_args()
    sides: list[tuple[str, Any]] = [("ours", ours)] if options.ours_only else [("ours", ours), ("fla", theirs)]
    chosen = [row for row in rows() if options.rows in " ".join(row)]
    if options.prewarm:
        share, shares = options.prewarm
        for row, (_, make) in [(r, s) for r in chosen for s in sides][share::shares]:
            _, both, wait = make(*row)
            wait(both())
        return
    results: list[dict[str, Any]] = []
    print("| shape | gate | ours fwd | fla fwd | ratio | ours fwd+bwd | fla fwd+bwd | ratio | floors | ours back to back |")
    print("|---" * 10 + "|")
    for name, kind in chosen:
        row: dict[str, Any] = {"shape": name, "gate": kind, "floor": floor_ms(name, kind), "fla": (float("nan"), float("nan"))}
        for label, make in sides:
            try:
                forward, both, wait = make(name, kind)
                row[label] = (kernel_ms(forward, wait), kernel_ms(both, wait))
                row[label + " back to back"] = (wall_ms(forward, wait), wall_ms(both, wait))
            except Exception as error:  # a side that cannot run a row must not take the table with it
                print(f"{label} {name} {kind}: {type(error).__name__}: {error}", file=sys.stderr)
                row[label] = (float("nan"), float("nan"))
        results.append(row)
        (a, b), (c, d), (f, g), (x, y) = row["ours"], row["fla"], row["floor"], row.get("ours back to back", (0.0, 0.0))
        times = f"{a:.3f} | {c:.3f} | {a / c:.2f} | {b:.3f} | {d:.3f} | {b / d:.2f} | {f:.3f}, {g:.3f} | {x:.3f}, {y:.3f}"
        print(f"| {name} | {kind} | {times} |", flush=True)
        gc.collect()
    step, floor = decode_ms()
    print(f"decode step {step:.4f} ms, byte floor {floor:.4f}, ratio {step / floor:.2f}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"rows": results, "decode": [step, floor], "device": str(jax.devices()[0])}, file, indent=1)


if __name__ == "__main__":
    main()
