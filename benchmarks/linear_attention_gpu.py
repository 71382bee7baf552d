"""Gated linear attention on a GPU: the triton platform beside flash-linear-attention and jax-linear-attention, in one run.

    python -m benchmarks.linear_attention_gpu [--json rows.jsonl] [--sides ours fla jla] [--rows TEXT ...] [--kernels]
    python -m benchmarks.linear_attention_gpu --json rows.jsonl --seconds-in-all 500   ends in time; again: goes on from there
    python -m benchmarks.linear_attention_gpu --ours-only --cfg '{"block_d": 32}'       ours alone, with other tiles
    python -m benchmarks.linear_attention_gpu --ours-only --plan '{"min_segment": 4}'         with another plan
    python -m benchmarks.linear_attention_gpu --errors [--json errors.jsonl]            errors of each side against float64
    python -m benchmarks.linear_attention_gpu --plot rows.jsonl picture.png
    python -m benchmarks.linear_attention_gpu --tiny                                    tries the script, on any device

Times are kernel times: CUPTI's durations of every kernel that a call launches, summed, over back-to-back calls, for all
sides by the same profiler (torch's). A side that does not take a call is left out of its row, and stderr says why.
Flash-linear-attention's tuning is cleared between shapes. Its scalar-gate backward refuses to run on Hopper with Triton 3.4
to 3.7.0; that guard is switched off here, as a speed mark only. Its tuning candidates are compiled on all cores and timed for
10 ms each, which makes a whole table possible in minutes. Jax-linear-attention has no call without a gate: it gets zeros.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernel_times import BANDWIDTH, Arrays, Calls, difference, jitted, kernel_ms, named, print_kernels
from ejkernel.kernels._linear import LinearConfig
from ejkernel.modules import recurrent_attention
from ejkernel.testing import jax_linear
from ejkernel.testing.bench_run import Run, by_row
from ejkernel.testing.compare import relative_rms
from ejkernel.testing.flash_linear import FlashLinear, forget_tuning, tune_on_all_cores
from ejkernel.testing.flash_linear import missing as fla_missing
from ejkernel.testing.linear_gpu import KINDS, RESETS, SHAPES, inputs, rows
from ejkernel.testing.results import Line, read

Inputs = tuple[Arrays, jax.Array, np.ndarray | None]  # arrays, adjoint of the output, cu_seqlens
ROWS = [*rows(), ("8x2048x16x128x128", RESETS)]
TINY = (1, 70, 2, 64, 64)
ERRORS_SHAPE = (1, 1024, 16, 128, 128)
NAMES = {"ours": "ejkernel", "fla": "flash-linear-attention", "jla": "jax-linear-attention"}


def inputs_of(name: str, kind: str) -> Inputs:
    arrays, do, cu = inputs(name, kind)
    if kind == RESETS:
        chosen = jax.random.uniform(jax.random.key(9), arrays["gk"].shape) < 1 / 8
        arrays["gk"] = jnp.where(chosen, jnp.asarray(-1e4, arrays["gk"].dtype), arrays["gk"])
    return arrays, do, cu


def ours(arrays: Arrays, do: jax.Array, cu: np.ndarray | None, cfg: LinearConfig | None = None, tiny: bool = False) -> Calls:
    """g_gamma is a constant of the layer, as it is for flash-linear-attention."""
    cu_seqlens = None if cu is None else jnp.asarray(cu)
    gamma = {n: arrays[n] for n in ("g_gamma",) if n in arrays}
    if tiny:
        attend: Callable[..., jax.Array] = recurrent_attention
        run = lambda arrays: attend(**arrays, **gamma, cu_seqlens=cu_seqlens)
    else:
        from ejkernel.kernels._triton import recurrent

        run = lambda arrays: recurrent(**arrays, **gamma, cu_seqlens=cu_seqlens, cfg=cfg)[0]
    return jitted(run, {n: x for n, x in arrays.items() if n not in gamma}, do)


def fla(arrays: Arrays, do: jax.Array, cu: np.ndarray | None, *, keep_tuning: bool = False) -> Calls:
    if not keep_tuning:
        forget_tuning()
    call = FlashLinear(arrays, do, cu, skip_guard=True)
    return call.forward, call.both, call.wait


def jla(arrays: Arrays, do: jax.Array, cu: np.ndarray | None) -> Calls:
    gamma = {n: arrays[n] for n in ("g_gamma",) if n in arrays}
    run = jax_linear.linear(cu)
    return jitted(lambda arrays: run(**arrays, **gamma), {n: x for n, x in arrays.items() if n not in gamma}, do)


SIDES: dict[str, Callable[..., Calls]] = {"ours": ours, "fla": fla, "jla": jla}
MISSING = {"fla": fla_missing, "jla": jax_linear.missing}


def floor_ms(name: str, kind: str) -> tuple[float, float]:
    """Compulsory bytes over bandwidth: (forward, forward + backward)."""
    arrays, do, _ = jax.eval_shape(lambda: (*inputs_of(name, kind)[:2], 0))
    size = lambda xs: sum(x.size * x.dtype.itemsize for x in xs)
    forward = size(arrays.values()) + size([do])
    return forward / BANDWIDTH * 1e3, (2 * forward + size(arrays.values())) / BANDWIDTH * 1e3


def decode_ms() -> dict[str, float]:
    """One decode step with 128 sequences and 16 heads of 128 x 128, and its byte floor."""
    from ejkernel.kernels._triton import recurrent

    B, H, K = 128, 16, 128
    x = [jax.random.normal(jax.random.key(i), (B, 1, H, K), jnp.float32).astype(jnp.bfloat16) for i in range(3)]
    gk = -jnp.abs(x[0])
    step = jax.jit(lambda q, k, v, gk, S: recurrent(q, k, v, gk=gk, initial_state=S), donate_argnums=4)
    state = [jnp.zeros((B, H, K, K), jnp.float32)]

    def call() -> Any:
        out, state[0] = step(*x, gk, state[0])
        return out

    return {"ms": kernel_ms(call, jax.block_until_ready), "floor": 2 * B * H * K * K * 4 / BANDWIDTH * 1e3}


def errors(run: Run, sides: dict[str, Callable[..., Calls]]) -> None:
    """Errors of each side against float64 on the same bfloat16 inputs: output and every gradient."""
    print("| gate | strength | side | output | dquery | dkey | dvalue | dgk or dg | dgv |\n" + "|---" * 9 + "|")
    for kind in (*KINDS, "gk+gv"):
        for strength in ("mild", "strong", "near -20", "resets", "-inf") if kind in ("gk", "g", "gk+gv") else ("mild",):
            if not run.asks_for(f"{kind} {strength};"):
                continue
            given = functools.cache(functools.partial(_judged, kind, strength))
            for label, make in sides.items():
                measure = lambda make=make, given=given: {"errors": _errors_of(make, *given())}
                if (line := run.part(label, measure, what="errors", gate=kind, strength=strength)) is not None:
                    cells = " | ".join(f"{e:.1e}" for e in line["errors"].values())
                    print(f"| {kind} | {strength} | {label} | {cells} |", flush=True)


def _judged(kind: str, strength: str) -> tuple[Arrays, jax.Array, Arrays]:
    """(arrays, adjoint of the output, what is right by name)."""
    from tests.triton.linear_cases import GATES
    from tests.triton.linear_reference import value_and_grads

    B, _, H, K, V = SHAPES["errors"]
    arrays, do, _ = inputs("errors", kind)
    for number, gate in enumerate(sorted(arrays.keys() & {"gk", "gv", "g"})):
        noise = jax.random.normal(jax.random.key(7 + number), arrays[gate].shape, jnp.float32)
        arrays[gate] = GATES[strength](noise).astype(arrays[gate].dtype)
    per_sequence = {n: x[None] for n, x in arrays.items() if n == "g_gamma"}  # as the reference takes it
    (output, _), want = value_and_grads(arrays | per_sequence, (do, jnp.zeros((B, H, K, V))), K**-0.5)
    return arrays, do, {"output": output, **want}


def _errors_of(make: Callable[..., Calls], arrays: Arrays, do: jax.Array, want: Arrays) -> dict[str, float]:
    _, both, wait = make(dict(arrays), do, None)
    wait(result := both())
    got = named(result)
    names = [n for n in ("output", "query", "key", "value", "gk", "g", "gv") if n in arrays or n == "output"]
    return {n: relative_rms(got[n], want[n]) for n in names}


def measured(run: Run, name: str, kind: str, sides: dict[str, Callable[..., Calls]], kernels: bool) -> Line:
    """One row: by side its milliseconds (forward, forward + backward) and how far its results are from ours; floors."""

    mine: dict[str, jax.Array] = {}

    def measure(side: str) -> dict[str, Any]:
        forward, both, wait = sides[side](*inputs_of(name, kind))
        times = kernel_ms(forward, wait), kernel_ms(both, wait)
        if kernels and side == "ours":
            for call in (forward, both):
                print_kernels(call, wait)
        found: dict[str, Any] = {"ms": times, "floor": floor_ms(name, kind)}
        wait(result := both())
        if side == "ours":
            mine.update(named(result))
        elif "ours" in sides:
            if not mine:  # measured by an earlier run
                mine.update(named(sides["ours"](*inputs_of(name, kind))[1]()))
            got = named(result)
            found["differs by"] = max(float(difference(mine[n], x)) for n, x in got.items() if n in mine)
        return found

    lines = [run.part(side, functools.partial(measure, side), shape=name, gate=kind) for side in sides]
    return next(iter(by_row(filter(None, lines), "shape", "gate")), {"shape": name, "gate": kind})


def line_of(row: Line, sides: Iterable[str]) -> str:
    """A row of the table: ours, then each rival's times, ours over its, and the largest difference of results."""
    floors = [row[side]["floor"] for side in sides if side in row]
    cells = [row["shape"], row["gate"], "{:.3f} / {:.3f}".format(*floors[0]) if floors else "-"]
    for side in sides:
        cells.append("{:.3f} / {:.3f}".format(*row[side]["ms"]) if side in row else "-")
        if side != "ours":
            both = side in row and "ours" in row
            ratios = [a / b for a, b in zip(row["ours"]["ms"], row[side]["ms"], strict=True)] if both else []
            cells.append("{:.2f} / {:.2f}".format(*ratios) if both else "-")
            cells.append(f"{row[side]['differs by']:.1e}" if "differs by" in row.get(side, {}) else "-")
    return "| " + " | ".join(cells) + " |"


def plot(source: str, target: str) -> None:
    """The table as a picture: times over the floor that the bytes set, a mark for each side."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

    rows = by_row([line for line in read(source) if "floor" in line], "shape", "gate")
    over_floor = lambda line, index: line["ms"][index] / line["floor"][index]
    figure, axes = plt.subplots(1, 2, figsize=(11, 0.32 * len(rows) + 1.6), sharey=True, layout="constrained")
    marks = {"ours": ("tab:blue", "o"), "fla": ("0.5", "s"), "jla": ("tab:orange", "D")}
    for axis, index, title in zip(axes, (0, 1), ("forward", "forward + backward"), strict=True):
        for place, row in enumerate(rows):
            ratios = [over_floor(row[side], index) for side in marks if side in row]
            axis.hlines(place, min(ratios), max(ratios), color="0.85", linewidth=3, zorder=1)
        for side, (colour, shape) in marks.items():
            there = [(over_floor(row[side], index), place) for place, row in enumerate(rows) if side in row]
            if there:
                axis.scatter(*zip(*there, strict=True), color=colour, marker=shape, s=26, label=NAMES[side], zorder=2)
        axis.set_xscale("log")
        axis.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.xaxis.set_major_formatter(ScalarFormatter())
        axis.xaxis.set_minor_locator(NullLocator())
        axis.axvline(1, color="tab:red", linewidth=1)
        axis.set_xlabel("times the byte floor (1 = as fast as memory allows)")
        axis.set_title(title)
        axis.grid(axis="x", alpha=0.3)
    axes[0].set_yticks(range(len(rows)), [f"{row['shape']}  {row['gate']}" for row in rows])
    axes[0].invert_yaxis()
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=len(marks))
    figure.savefig(target, dpi=150)


def change_plans(fields: dict[str, Any]) -> None:
    """From here on every plan of a triton call has these fields: to time what no configuration chooses yet."""
    from ejkernel.kernels._triton.linear._plan import Plan

    usual = Plan.of
    Plan.of = lambda *given: dataclasses.replace(usual(*given), **fields)  # type: ignore[method-assign]


def chosen_sides(options: argparse.Namespace, run: Run) -> dict[str, Callable[..., Calls]]:
    """The sides that are asked for and can run here; stderr says which cannot."""
    sides = dict(SIDES)
    cfg = None if options.cfg is None else LinearConfig(**{"schedule": "chunked", "block_q": 64, **options.cfg})
    sides["ours"] = functools.partial(ours, cfg=cfg, tiny=options.tiny)
    asked = ["ours"] if options.ours_only else options.sides
    return {side: sides[side] for side in run.runnable([side for side in SIDES if side in asked], MISSING)}


def options_given() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    Run.add_options(parser)
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=list(SIDES))
    parser.add_argument("--ours-only", action="store_true", help="leave the others out (fla's tuning takes a minute a row)")
    parser.add_argument("--kernels", action="store_true", help="ours, kernel by kernel")
    parser.add_argument("--cfg", type=json.loads, help="fields of a configuration for ours, as JSON")
    parser.add_argument("--plan", type=json.loads, help="static data of ours to change, as JSON: fields of triton's `Plan`")
    parser.add_argument("--errors", action="store_true", help="errors against float64 instead of times")
    parser.add_argument("--tiny", action="store_true", help="rows of 70 tokens, ours on any platform: to try this script")
    parser.add_argument("--plot", nargs=2, metavar=("RESULTS", "PICTURE"), help="draw a picture of earlier results")
    return parser.parse_args()


def main() -> None:
    options = options_given()
    if options.plot:
        plot(*options.plot)
        return
    SHAPES["errors"] = ERRORS_SHAPE
    if options.tiny:
        SHAPES.update({name: TINY for name in SHAPES if not name.startswith("packed")})
    if options.plan:
        change_plans(options.plan)
    run = Run(options)
    sides = chosen_sides(options, run)
    if "fla" in sides and not run.shows:
        tune_on_all_cores()
    if options.errors:
        errors(run, {**sides, "fla": functools.partial(fla, keep_tuning=True)} if "fla" in sides else sides)
        return
    if run.asks_for("decode gk;") and not options.tiny and "ours" in sides:
        step = run.part("ours", decode_ms, what="decode")
        if step is not None:
            ratio = step["ms"] / step["floor"]
            print(f"decode step {step['ms']:.4f} ms, byte floor {step['floor']:.4f}, ratio {ratio:.2f}", flush=True)
    heads = [part for side in sides for part in ([side] if side == "ours" else [side, f"ours / {side}", "apart"])]
    print("| shape | gate | floors | " + " | ".join(heads) + " |\n" + "|---" * (3 + len(heads)) + "|")
    for name, kind in ROWS:
        if run.asks_for(f"{name} {kind};") and not (options.tiny and name.startswith("packed")):
            print(line_of(measured(run, name, kind, sides, options.kernels), sides), flush=True)


if __name__ == "__main__":
    main()
