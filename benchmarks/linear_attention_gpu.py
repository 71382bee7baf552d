"""Gated linear attention on a GPU: the triton platform beside flash-linear-attention and jax-linear-attention, in one run.

    python -m benchmarks.linear_attention_gpu [--json rows.jsonl] [--sides ours fla jla] [--rows TEXT ...] [--kernels]
    python -m benchmarks.linear_attention_gpu --ours-only --cfg '{"block_d": 32}'       ours alone, with other tiles
    python -m benchmarks.linear_attention_gpu --ours-only --plan '{"min_segment": 4}'         with another plan
    python -m benchmarks.linear_attention_gpu --sides ours untimed --rows packed        beside kernels that no GPU has timed
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
import gc
import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernel_times import (
    BANDWIDTH,
    Arrays,
    Calls,
    Lines,
    difference,
    jitted,
    kernel_ms,
    named,
    print_kernels,
    read_lines,
)
from ejkernel.kernels._linear import LinearConfig
from ejkernel.modules import recurrent_attention
from ejkernel.testing import jax_linear
from ejkernel.testing.compare import relative_rms
from ejkernel.testing.flash_linear import FlashLinear, forget_tuning, tune_on_all_cores
from ejkernel.testing.flash_linear import missing as fla_missing
from ejkernel.testing.linear_gpu import KINDS, SHAPES, inputs, rows

Inputs = tuple[Arrays, jax.Array, np.ndarray | None]  # arrays, adjoint of the output, cu_seqlens
RESETS = "gk, resets"  # in every chunk, in an eighth of the channels of each token
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


def untimed(arrays: Arrays, do: jax.Array, cu: np.ndarray | None, cfg: LinearConfig | None = None, tiny: bool = False) -> Calls:
    """Ours where kernels that no GPU has timed are asked for."""
    from ejkernel.kernels._triton.linear._plan import untimed_kernels

    forward, both, wait = ours(arrays, do, cu, cfg, tiny)

    def asking(call: Callable[[], Any]) -> Callable[[], Any]:
        def asked() -> Any:
            with untimed_kernels():  # a call is planned when it is first made
                return call()

        return asked

    return asking(forward), asking(both), wait


def fla(arrays: Arrays, do: jax.Array, cu: np.ndarray | None, *, keep_tuning: bool = False) -> Calls:
    if not keep_tuning:
        forget_tuning()
    call = FlashLinear(arrays, do, cu, skip_guard=True)
    return call.forward, call.both, call.wait


def jla(arrays: Arrays, do: jax.Array, cu: np.ndarray | None) -> Calls:
    gamma = {n: arrays[n] for n in ("g_gamma",) if n in arrays}
    run = jax_linear.linear(cu)
    return jitted(lambda arrays: run(**arrays, **gamma), {n: x for n, x in arrays.items() if n not in gamma}, do)


SIDES: dict[str, Callable[..., Calls]] = {"ours": ours, "untimed": untimed, "fla": fla, "jla": jla}
USUAL_SIDES = ["ours", "fla", "jla"]
MISSING = {"fla": fla_missing, "jla": jax_linear.missing}


def floor_ms(name: str, kind: str) -> tuple[float, float]:
    """Compulsory bytes over bandwidth: (forward, forward + backward)."""
    arrays, do, _ = jax.eval_shape(lambda: (*inputs_of(name, kind)[:2], 0))
    size = lambda xs: sum(x.size * x.dtype.itemsize for x in xs)
    forward = size(arrays.values()) + size([do])
    return forward / BANDWIDTH * 1e3, (2 * forward + size(arrays.values())) / BANDWIDTH * 1e3


def decode_ms() -> tuple[float, float]:
    """(one decode step with 128 sequences and 16 heads of 128 x 128, its byte floor)."""
    from ejkernel.kernels._triton import recurrent

    B, H, K = 128, 16, 128
    x = [jax.random.normal(jax.random.key(i), (B, 1, H, K), jnp.float32).astype(jnp.bfloat16) for i in range(3)]
    gk = -jnp.abs(x[0])
    step = jax.jit(lambda q, k, v, gk, S: recurrent(q, k, v, gk=gk, initial_state=S), donate_argnums=4)
    state = [jnp.zeros((B, H, K, K), jnp.float32)]

    def call() -> Any:
        out, state[0] = step(*x, gk, state[0])
        return out

    return kernel_ms(call, jax.block_until_ready), 2 * B * H * K * K * 4 / BANDWIDTH * 1e3


def errors(sides: dict[str, Callable[..., Calls]], lines: Lines) -> None:
    """Errors of each side against float64 on the same bfloat16 inputs: output and every gradient."""
    from tests.triton.linear_cases import GATES
    from tests.triton.linear_reference import value_and_grads

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
            for label, make in sides.items():
                try:
                    _, both, wait = make(dict(arrays), do, None)
                    wait(result := both())
                    got = named(result)
                except Exception as problem:  # a side that cannot run a line must not take the table with it
                    _leaves_out(label, kind, strength, problem)
                    continue
                found = [relative_rms(got["output"], want_output), *(relative_rms(got[n], want[n]) for n in names)]
                lines.add(gate=kind, strength=strength, side=label, errors=dict(zip(("output", *names), found, strict=True)))
                print(f"| {kind} | {strength} | {label} | " + " | ".join(f"{e:.1e}" for e in found) + " |", flush=True)


def _leaves_out(side: str, shape: str, kind: str, problem: Exception) -> None:
    first = (str(problem).splitlines() or [""])[0][:160]
    print(f"{side} leaves out {shape}, {kind}: {type(problem).__name__}: {first}", file=sys.stderr, flush=True)


def measured(name: str, kind: str, sides: dict[str, Callable[..., Calls]], kernels: bool) -> dict[str, Any]:
    """One row: milliseconds (forward, forward + backward) by side, floors, and how far results are from ours."""
    row: dict[str, Any] = {"shape": name, "gate": kind, "floor": floor_ms(name, kind)}
    mine: dict[str, jax.Array] = {}
    for side, make in sides.items():
        try:
            forward, both, wait = make(*inputs_of(name, kind))
            times = kernel_ms(forward, wait), kernel_ms(both, wait)
            if kernels and side in ("ours", "untimed"):
                for call in (forward, both):
                    print_kernels(call, wait)
            wait(result := both())
            got = named(result)
        except Exception as problem:  # a side that cannot run a row must not take the table with it
            _leaves_out(side, name, kind, problem)
            continue
        row[side] = times
        if side == "ours":
            mine = got
        elif mine:
            row[f"{side} differs by"] = max(float(difference(mine[n], x)) for n, x in got.items() if n in mine)
        del forward, both, result, got  # memory for the next side
        gc.collect()
    return row


def line_of(row: dict[str, Any], sides: dict[str, Callable[..., Calls]]) -> str:
    """A row of the table: ours, then each rival's times, ours over its, and the largest difference of results."""
    cells = [row["shape"], row["gate"], f"{row['floor'][0]:.3f} / {row['floor'][1]:.3f}"]
    for side in sides:
        cells.append("{:.3f} / {:.3f}".format(*row[side]) if side in row else "-")
        if side != "ours":
            both = side in row and "ours" in row
            cells.append(
                "{:.2f} / {:.2f}".format(*(a / b for a, b in zip(row["ours"], row[side], strict=True))) if both else "-"
            )
            cells.append(f"{row[f'{side} differs by']:.1e}" if f"{side} differs by" in row else "-")
    return "| " + " | ".join(cells) + " |"


def plot(source: str, target: str) -> None:
    """The table as a picture: times over the floor that the bytes set, a mark for each side."""
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullLocator, ScalarFormatter

    rows = [line for line in read_lines(source) if "floor" in line]
    figure, axes = plt.subplots(1, 2, figsize=(11, 0.32 * len(rows) + 1.6), sharey=True, layout="constrained")
    marks = {"ours": ("tab:blue", "o"), "fla": ("0.5", "s"), "jla": ("tab:orange", "D")}
    for axis, index, title in zip(axes, (0, 1), ("forward", "forward + backward"), strict=True):
        for place, row in enumerate(rows):
            ratios = [row[side][index] / row["floor"][index] for side in marks if side in row]
            axis.hlines(place, min(ratios), max(ratios), color="0.85", linewidth=3, zorder=1)
        for side, (colour, shape) in marks.items():
            there = [(row[side][index] / row["floor"][index], place) for place, row in enumerate(rows) if side in row]
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


def chosen_sides(options: argparse.Namespace) -> dict[str, Callable[..., Calls]]:
    """The sides that are asked for and can run here; stderr says which cannot."""
    sides = dict(SIDES)
    cfg = None if options.cfg is None else LinearConfig(**{"schedule": "chunked", "block_q": 64, **options.cfg})
    sides |= {side: functools.partial(sides[side], cfg=cfg, tiny=options.tiny) for side in ("ours", "untimed")}
    asked = ["ours"] if options.ours_only else options.sides
    absent = {side: reason for side in asked if side in MISSING and (reason := MISSING[side]()) is not None}
    for side, reason in absent.items():
        print(f"{side} is left out: {reason}", file=sys.stderr)
    return {side: sides[side] for side in SIDES if side in asked and side not in absent}


def options_given() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="where the numbers go: an object a line, as they are measured")
    parser.add_argument("--sides", nargs="+", default=USUAL_SIDES, choices=list(SIDES))
    parser.add_argument("--ours-only", action="store_true", help="leave the others out (fla's tuning takes a minute a row)")
    parser.add_argument("--rows", nargs="*", default=[""], help="only rows whose 'shape gate;' contains one of these")
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
    sides, lines = chosen_sides(options), Lines(options.json)
    if "fla" in sides:
        tune_on_all_cores()
    if options.errors:
        errors({**sides, "fla": functools.partial(fla, keep_tuning=True)} if "fla" in sides else sides, lines)
        return
    if options.rows == [""] and not options.tiny:
        step, floor = decode_ms()
        lines.add(decode=(step, floor))
        print(f"decode step {step:.4f} ms, byte floor {floor:.4f}, ratio {step / floor:.2f}", flush=True)
    heads = [part for side in sides for part in ([side] if side == "ours" else [side, f"ours / {side}", "apart"])]
    print("| shape | gate | floors | " + " | ".join(heads) + " |\n" + "|---" * (3 + len(heads)) + "|")
    asked = [row for row in ROWS if any(text in f"{row[0]} {row[1]};" for text in options.rows)]
    for name, kind in asked:
        if options.tiny and name.startswith("packed"):
            continue
        row = measured(name, kind, sides, options.kernels)
        lines.add(**row)
        print(line_of(row, sides), flush=True)


if __name__ == "__main__":
    main()
