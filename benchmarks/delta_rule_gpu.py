"""The gated delta rule on a GPU: the triton platform beside flash-linear-attention and jax-linear-attention, in one run.

    python -m benchmarks.delta_rule_gpu [--sides ours fla jla] [--rows TEXT ...] [--kernels] [--json results.jsonl]
    python -m benchmarks.delta_rule_gpu --errors                              errors against float64
    python -m benchmarks.delta_rule_gpu --untimed [--rows TEXT ...]           ours beside itself with kernels not timed yet

Times are kernel times, measured as in `linear_attention_gpu`: CUPTI's durations of every kernel that a call launches. A side
that does not take a call is left out of its row. --kernels lists ours one by one.
"""

from __future__ import annotations

import argparse
import functools
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
    beside_untimed,
    difference,
    jitted,
    kernel_ms,
    named,
    print_kernels,
)
from ejkernel.kernels._delta import GatedDeltaRuleConfig
from ejkernel.kernels._triton import gated_delta_rule
from ejkernel.testing import jax_linear
from ejkernel.testing.compare import relative_rms
from ejkernel.testing.delta_cases import BETA_KINDS, GATE_KINDS, KEY_KINDS, DeltaCase
from ejkernel.testing.delta_gpu import ROWS, inputs
from ejkernel.testing.flash_delta import FlashDelta
from ejkernel.testing.flash_linear import forget_tuning, tune_on_all_cores


def ours(arrays: Arrays, do: jax.Array, cu: np.ndarray | None, cfg: GatedDeltaRuleConfig | None = None) -> Calls:
    cu_seqlens = None if cu is None else jnp.asarray(cu)
    return jitted(lambda arrays: gated_delta_rule(**arrays, cu_seqlens=cu_seqlens, cfg=cfg)[0], arrays, do)


def fla(arrays: Arrays, do: jax.Array, cu: np.ndarray | None, *, keep_tuning: bool = False) -> Calls:
    """Its guard against Triton 3.4 to 3.7.0 on Hopper is switched off, as a mark of speed only."""
    if not keep_tuning:
        forget_tuning()
    call = FlashDelta(arrays, do, cu, skip_guard=True)
    return call.forward, call.both, call.wait


def jla(arrays: Arrays, do: jax.Array, cu: np.ndarray | None) -> Calls:
    run = jax_linear.delta(cu)
    return jitted(lambda arrays: run(**arrays), arrays, do)


SIDES: dict[str, Callable[..., Calls]] = {"ours": ours, "fla": fla, "jla": jla}


UNTIMED = ["4x4096x32x64x64 channel;"]  # rows by default: those whose calls have such kernels and are nearest to their marks


def decode() -> None:
    """A step of 128 sequences with 16 heads of 128 x 128, the state in place, beside its byte floor."""
    B, H, K = 128, 16, 128
    floor = 2 * B * H * K * K * 4 / BANDWIDTH * 1e3
    for kind in ("head", "channel"):
        x = [jax.random.normal(jax.random.key(i), (B, 1, H, K), jnp.float32).astype(jnp.bfloat16) for i in range(3)]
        beta = jax.nn.sigmoid(x[0][..., 0])
        g = -jnp.abs(x[1] if kind == "channel" else x[1][..., 0])
        step = jax.jit(lambda q, k, v, beta, g, S: gated_delta_rule(q, k, v, beta, g, initial_state=S), donate_argnums=5)
        state = [jnp.zeros((B, H, K, K), jnp.float32)]

        def call(step=step, x=x, beta=beta, g=g, state=state) -> Any:
            out, state[0] = step(*x, beta, g, state[0])
            return out

        took = kernel_ms(call, jax.block_until_ready)
        print(f"decode, gate per {kind}: {took:.4f} ms, byte floor {floor:.4f}, ratio {took / floor:.2f}", flush=True)


class OutputAlone(DeltaCase):
    """A case whose loss weighs the output alone, as a layer's does, by numbers that bfloat16 holds."""

    def weights(self) -> tuple[np.ndarray, np.ndarray]:
        output, state = super().weights()
        return np.asarray(jnp.asarray(output).astype(jnp.bfloat16).astype(jnp.float32)), np.zeros_like(state)


def errors(sides: list[str]) -> None:
    """Relative RMS errors against float64 on the same bfloat16 inputs: output and every gradient."""

    print("| gate | strength | keys | beta | side | output | dquery | dkey | dvalue | dbeta | dg |\n" + "|---" * 11 + "|")
    some = [(gate, kind, "unit", "usual") for gate in ("head", "channel") for kind in GATE_KINDS if kind != "positive"]
    some += [(gate, "mild", keys, beta) for gate in ("head", "channel") for keys in KEY_KINDS for beta in BETA_KINDS]
    for gate, kind, keys, beta in [(None, "mild", "unit", "usual"), *some]:
        case = OutputAlone(
            "errors", batch=1, time=512, key_channels=64, value_channels=64, gate=gate, gate_kind=kind, key_kind=keys,
            beta_kind=beta, dtype="bfloat16",
        )  # fmt: skip
        arrays, _ = case.arguments()
        want, do = case.expected(), jnp.asarray(case.weights()[0]).astype(jnp.bfloat16)
        for label in sides:
            make = functools.partial(fla, keep_tuning=True) if label == "fla" else SIDES[label]  # one shape, one tuning
            try:
                _, both, wait = make(dict(arrays), do, None)
                wait(result := both())
            except Exception as problem:  # a side that cannot run a line must not take the table with it
                print(f"{label} leaves out {gate}, {kind}: {str(problem).splitlines()[0][:120]}", file=sys.stderr, flush=True)
                continue
            got = named(result)
            names = [n for n in ("output", "query", "key", "value", "beta", "g") if n in got]
            found = [relative_rms(got[n], want[n if n == "output" else f"d{n}"]) for n in names]
            print(
                f"| {gate} | {kind} | {keys} | {beta} | {label} | " + " | ".join(f"{e:.1e}" for e in found) + " |", flush=True
            )


def untimed(rows: list[tuple[str, str]], lines: Lines) -> None:
    """Forward calls with the kernels in use and with those that no GPU has timed: which of them win?"""
    for name, kind in rows:
        arrays, do, cu = inputs(name, kind)
        row = {"shape": name, "gate": kind, **beside_untimed(functools.partial(ours, arrays, do, cu))}
        lines.add(**row)
        alone = [", ".join(f"{n} {ms:.4f}" for n, ms in row[f"{form} alone"].items()) for form in ("in use", "untimed")]
        whole = f"{row['untimed']:.4f} for {row['in use']:.4f} ({row['untimed'] / row['in use']:.3f})"
        print(f"| {name} | {kind} | {whole} | {alone[1]} for {alone[0]} | {row['apart']:.1e} apart |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=list(SIDES))
    parser.add_argument("--rows", nargs="*", default=[""], help="only rows whose 'shape gate;' contains one of these")
    parser.add_argument("--kernels", action="store_true", help="ours, kernel by kernel")
    parser.add_argument("--cfg", type=json.loads, help="fields of a configuration for ours, as JSON")
    parser.add_argument("--errors", action="store_true", help="errors against float64 instead of times")
    parser.add_argument("--untimed", action="store_true", help="kernels that no GPU has timed yet beside those in use, forward")
    parser.add_argument("--json", help="where the numbers go: an object a line, as they are measured")
    options = parser.parse_args()
    if options.untimed:
        asked = options.rows if options.rows != [""] else UNTIMED
        untimed([row for row in ROWS if any(text in f"{row[0]} {row[1]};" for text in asked)], Lines(options.json))
        return
    if "fla" in options.sides:
        tune_on_all_cores()
    if options.errors:
        errors(options.sides)
        return
    cfg = None if options.cfg is None else GatedDeltaRuleConfig(**{"schedule": "chunked", "block_q": 64, **options.cfg})
    if options.rows == [""]:
        decode()
    lines = Lines(options.json)
    for name, kind in (row for row in ROWS if any(text in f"{row[0]} {row[1]};" for text in options.rows)):
        row: dict[str, Any] = {"shape": name, "gate": kind}
        first = None
        for side in options.sides:
            arrays, do, cu = inputs(name, kind)
            try:
                make = SIDES[side](arrays, do, cu, *([cfg] if side == "ours" else []))
                forward, both, wait = make
                row[side] = kernel_ms(forward, wait), kernel_ms(both, wait)
                if options.kernels and side == "ours":
                    print_kernels(both, wait)
                result = named(both())
                if first is None:
                    first = result
                else:
                    row[f"{side} differs by"] = max(float(difference(result[n], first[n])) for n in first if n in result)
            except Exception as problem:
                print(f"{side} leaves out {name}, {kind}: {str(problem).splitlines()[0][:120]}", file=sys.stderr, flush=True)
        lines.add(**row)
        print(_line(row), flush=True)


def _line(row: dict[str, Any]) -> str:
    cells = [row["shape"], row["gate"]]
    for side in SIDES:
        if side in row:
            cells.append(f"{side} {row[side][0]:.3f} / {row[side][1]:.3f}")
            if side != "ours" and "ours" in row:
                ratios = [ours / theirs for ours, theirs in zip(row["ours"], row[side], strict=True)]
                cells.append(f"{ratios[0]:.2f} / {ratios[1]:.2f}, differs by {row[f'{side} differs by']:.0e}")
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
