"""Gated linear attention on a GPU: the triton platform beside flash-linear-attention, in one run on one machine.

    python -m benchmarks.linear_attention_gpu [--json results.json] [--ours-only] [--rows TEXT ...]
    python -m benchmarks.linear_attention_gpu --errors                       errors of both sides against float64
    python -m benchmarks.linear_attention_gpu --plot results.json picture.png

Times are kernel times: CUPTI's durations of every kernel that a call launches, summed, over back-to-back calls, for both
sides by the same profiler (torch's). Flash-linear-attention's tuning is cleared between shapes. Its scalar-gate backward
refuses to run on Hopper with Triton 3.4 to 3.7.0; that guard is switched off here, as a speed mark only. Its tuning candidates
are compiled on all cores and timed for 10 ms each, which is what makes a whole table possible in minutes.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._triton import recurrent
from ejkernel.testing.compare import relative_rms
from ejkernel.testing.flash_linear import FlashLinear, forget_tuning, tune_on_all_cores
from ejkernel.testing.linear_gpu import KINDS, SHAPES, Arrays, inputs, rows

BANDWIDTH = 4.3e12  # bytes a second, a device-to-device copy on an H200
ERRORS_SHAPE = (1, 1024, 16, 128, 128)


def ours(name: str, kind: str, given: Any = None) -> tuple[Callable[[], Any], Callable[[], Any], Callable[[Any], None]]:
    """(forward, forward + backward, wait) on the row's inputs or those given.

    g_gamma is a constant of the layer, as it is for flash-linear-attention.
    """
    arrays, do, cu = given or inputs(name, kind)
    cu_seqlens = None if cu is None else jnp.asarray(cu)
    gamma = {n: arrays.pop(n) for n in ("g_gamma",) if n in arrays}
    run = lambda arrays: recurrent(**arrays, **gamma, cu_seqlens=cu_seqlens)[0]
    forward = jax.jit(run)

    @jax.jit
    def both(arrays: Arrays, do: jax.Array) -> Any:
        out, pull = jax.vjp(run, arrays)
        return out, pull(do)[0]

    return lambda: forward(arrays), lambda: both(arrays, do), jax.block_until_ready


def theirs(
    name: str, kind: str, given: Any = None, *, keep_tuning: bool = False
) -> tuple[Callable[[], Any], Callable[[], Any], Callable[[Any], None]]:
    if not keep_tuning:
        forget_tuning()
    call = FlashLinear(*(given or inputs(name, kind)), skip_guard=True)
    return call.forward, call.both, call.wait


def named(result: Any) -> dict[str, jax.Array]:
    """output and gradients of a forward+backward result, torch's or JAX's."""
    output, gradients = result
    arrays = {"output": output, **gradients}
    return {n: x if isinstance(x, jax.Array) else jax.dlpack.from_dlpack(x.detach().contiguous()) for n, x in arrays.items()}


@jax.jit
def difference(a: jax.Array, b: jax.Array) -> jax.Array:
    """Relative RMS difference of two arrays, in float32 where they are."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.linalg.norm(a - b) / jnp.linalg.norm(b)


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


def errors() -> None:
    """Errors of both sides against float64 on the same bfloat16 inputs: output and every gradient."""
    from tests.triton.linear_cases import GATES
    from tests.triton.linear_reference import value_and_grads

    SHAPES["errors"] = ERRORS_SHAPE
    others = functools.partial(theirs, keep_tuning=True)  # one shape: what it found for one gate's strength serves the next
    B, _, H, K, V = SHAPES["errors"]
    print("| gate | strength | side | output | dquery | dkey | dvalue | dgk or dg | dgv |\n" + "|---" * 9 + "|")
    for kind in (*KINDS, "gk+gv"):
        for strength in ("mild", "strong", "near -20", "resets", "-inf") if kind in ("gk", "g", "gk+gv") else ("mild",):
            arrays, do, _ = inputs("errors", kind)
            for number, gate in enumerate(sorted(arrays.keys() & {"gk", "gv", "g"})):
                noise = jax.random.normal(jax.random.key(7 + number), arrays[gate].shape, jnp.float32)
                arrays[gate] = GATES[strength](noise).astype(arrays[gate].dtype)
            names = [n for n in ("query", "key", "value", "gk", "g", "gv") if n in arrays]
            per_sequence = {n: x[None] for n, x in arrays.items() if n == "g_gamma"}  # as the reference takes it
            (want_output, _), want = value_and_grads(arrays | per_sequence, (do, jnp.zeros((B, H, K, V))), K**-0.5)
            for label, make in (("ours", ours), ("fla", others)):
                _, both, wait = make("errors", kind, (dict(arrays), do, None))
                wait(result := both())
                got = named(result)
                found = [relative_rms(got["output"], want_output), *(relative_rms(got[n], want[n]) for n in names)]
                print(f"| {kind} | {strength} | {label} | " + " | ".join(f"{e:.1e}" for e in found) + " |", flush=True)


def plot(source: str, target: str) -> None:
    """The table as a picture: times over the floor that the bytes set, ours and flash-linear-attention's."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

    with open(source) as file:
        rows = json.load(file)["rows"]
    labels = [f"{row['shape']}  {row['gate']}" for row in rows]
    figure, axes = plt.subplots(1, 2, figsize=(11, 0.32 * len(rows) + 1.6), sharey=True, layout="constrained")
    places = range(len(rows))
    for axis, index, title in zip(axes, (0, 1), ("forward", "forward + backward"), strict=True):
        times = {side: [row[side][index] / row["floor"][index] for row in rows] for side in ("ours", "fla")}
        axis.hlines(places, times["ours"], times["fla"], color="0.85", linewidth=3, zorder=1)
        axis.scatter(times["ours"], places, color="tab:blue", label="ejkernel", zorder=2)
        axis.scatter(times["fla"], places, color="0.5", label="flash-linear-attention", zorder=2)
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter(ScalarFormatter())
        axis.xaxis.set_minor_locator(NullLocator())
        axis.axvline(1, color="tab:red", linewidth=1)
        axis.set_xlabel("times the byte floor (1 = as fast as memory allows)")
        axis.set_title(title)
        axis.grid(axis="x", alpha=0.3)
    axes[0].set_yticks(places, labels)
    axes[0].invert_yaxis()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=2)
    figure.savefig(target, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="where the numbers go")
    parser.add_argument(
        "--ours-only", action="store_true", help="leave the other library out (its tuning takes a minute a row)"
    )
    parser.add_argument("--rows", nargs="*", default=[""], help="only rows whose shape or gate contains one of these")
    parser.add_argument("--errors", action="store_true", help="errors against float64 instead of times")
    parser.add_argument("--plot", nargs=2, metavar=("RESULTS", "PICTURE"), help="draw a picture of earlier results")
    options = parser.parse_args()
    if options.plot:
        plot(*options.plot)
        return
    sides: list[tuple[str, Any]] = [("ours", ours)] if options.ours_only else [("ours", ours), ("fla", theirs)]
    if not options.ours_only:
        tune_on_all_cores()
    if options.errors:
        errors()
        return
    chosen = [row for row in rows() if any(text in " ".join(row) for text in options.rows)]
    step, floor = decode_ms()
    print(f"decode step {step:.4f} ms, byte floor {floor:.4f}, ratio {step / floor:.2f}")
    results: list[dict[str, Any]] = []
    print("| shape | gate | ours fwd | fla fwd | ratio | ours fwd+bwd | fla fwd+bwd | ratio | floors | largest difference |")
    print("|---" * 10 + "|")
    for name, kind in chosen:
        row: dict[str, Any] = {"shape": name, "gate": kind, "floor": floor_ms(name, kind), "fla": (float("nan"), float("nan"))}
        found = {}
        for label, make in sides:
            try:
                forward, both, wait = make(name, kind)
                row[label] = (kernel_ms(forward, wait), kernel_ms(both, wait))
                wait(result := both())
                found[label] = named(result)
            except Exception as error:  # a side that cannot run a row must not take the table with it
                print(f"{label} {name} {kind}: {type(error).__name__}: {error}", file=sys.stderr)
                row[label] = (float("nan"), float("nan"))
        if len(found) == 2:
            row["difference"] = max(float(difference(found["ours"][n], x)) for n, x in found["fla"].items())
        results.append(row)
        (a, b), (c, d), (f, g) = row["ours"], row["fla"], row["floor"]
        apart = f"{row['difference']:.1e}" if "difference" in row else "-"
        times = f"{a:.3f} | {c:.3f} | {a / c:.2f} | {b:.3f} | {d:.3f} | {b / d:.2f} | {f:.3f}, {g:.3f} | {apart}"
        print(f"| {name} | {kind} | {times} |", flush=True)
        if options.json:  # after every row: what is measured is kept if a later row fails
            with open(options.json, "w") as file:
                json.dump({"rows": results, "decode": [step, floor], "device": jax.devices()[0].device_kind}, file, indent=1)
        gc.collect()


if __name__ == "__main__":
    main()
