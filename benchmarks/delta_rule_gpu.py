"""The gated delta rule on a GPU: the triton platform beside flash-linear-attention and jax-linear-attention, in one run.

    python -m benchmarks.delta_rule_gpu [--sides ours fla jla] [--rows TEXT ...] [--kernels] [--json FILE] [--seconds-in-all S]
    python -m benchmarks.delta_rule_gpu --errors [--json FILE]                errors against float64
    python -m benchmarks.delta_rule_gpu --decode-tiles [--json FILE]          a step of decoding with other tiles
    TRITON_INTERPRET=1 python -m benchmarks.delta_rule_gpu --tiny --sides ours                                on a CPU

Times are kernel times, measured as in `linear_attention_gpu`: CUPTI's durations of every kernel that a call launches. A side
that does not take a call is left out of its row. --kernels lists ours one by one.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernel_times import BANDWIDTH, Arrays, Calls, difference, jitted, kernel_ms, named, print_kernels
from ejkernel.kernels._delta import DeltaProblem, GatedDeltaRuleConfig
from ejkernel.kernels._triton import gated_delta_rule
from ejkernel.testing import jax_linear
from ejkernel.testing.bench_run import Run, by_row
from ejkernel.testing.compare import relative_rms
from ejkernel.testing.delta_cases import BETA_KINDS, GATE_KINDS, KEY_KINDS, DeltaCase
from ejkernel.testing.delta_gpu import ROWS, SHAPES, calls, inputs
from ejkernel.testing.flash_delta import FlashDelta
from ejkernel.testing.flash_linear import forget_tuning, tune_on_all_cores
from ejkernel.testing.flash_linear import missing as fla_missing
from ejkernel.testing.results import Line


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
MISSING = {"fla": fla_missing, "jla": jax_linear.missing}
TINY = (1, 70, 2, 2, 64, 64)
STEP = (128, 16, 128)  # sequences, heads, channels
GATES_OF_STEPS = ("head", "channel")


def decode_ms(kind: str, cfg: GatedDeltaRuleConfig | None = None) -> dict[str, float]:
    """A step of 128 sequences with 16 heads of 128 x 128, the state in place, and its byte floor, with a gate of a kind."""
    B, H, K = STEP
    x = [jax.random.normal(jax.random.key(i), (B, 1, H, K), jnp.float32).astype(jnp.bfloat16) for i in range(3)]
    beta = jax.nn.sigmoid(x[0][..., 0])
    g = -jnp.abs(x[1] if kind == "channel" else x[1][..., 0])
    step = jax.jit(lambda q, k, v, beta, g, S: gated_delta_rule(q, k, v, beta, g, initial_state=S, cfg=cfg), donate_argnums=5)
    state = [jnp.zeros((B, H, K, K), jnp.float32)]

    def call() -> Any:
        out, state[0] = step(*x, beta, g, state[0])
        return out

    return {"ms": kernel_ms(call, jax.block_until_ready), "floor": 2 * B * H * K * K * 4 / BANDWIDTH * 1e3}


def decode(run: Run) -> None:
    """Both kinds of gates, beside their byte floor."""
    for kind in GATES_OF_STEPS:
        if not run.asks_for(f"decode {kind};"):
            continue
        if (line := run.part("ours", functools.partial(decode_ms, kind), what="decode", gate=kind)) is not None:
            print(f"decode, gate per {kind}: {_beside_floor(line)}", flush=True)


def decode_tiles(run: Run) -> None:
    """The step with every candidate of the tuner's by kernel times, which tell 1 % apart where its clock does not."""
    for kind in GATES_OF_STEPS:
        for cfg in _candidates(kind):
            if not run.asks_for(f"decode {kind};"):
                continue
            tiles = {name: x for name in ("block_d", "num_warps") if (x := getattr(cfg, name)) is not None}
            key = {"what": "decode", "gate": kind, "tiles": json.dumps(tiles)}
            if (line := run.part("ours", functools.partial(decode_ms, kind, cfg), **key)) is not None:
                print(f"decode, gate per {kind}, {tiles or 'as it is'}: {_beside_floor(line)}", flush=True)


def _candidates(kind: str) -> Sequence[GatedDeltaRuleConfig]:
    from ejkernel.kernels._triton.gated_delta_rule._platform import TritonDeltaRule

    arrays = calls()[f"decode {kind}"]
    return TritonDeltaRule().candidates(jax.eval_shape(lambda arrays: DeltaProblem(**arrays), arrays))


def _beside_floor(line: Line) -> str:
    return f"{line['ms']:.4f} ms, byte floor {line['floor']:.4f}, ratio {line['ms'] / line['floor']:.2f}"


class OutputAlone(DeltaCase):
    """A case whose loss weighs the output alone, as a layer's does, by numbers that bfloat16 holds."""

    def weights(self) -> tuple[np.ndarray, np.ndarray]:
        output, state = super().weights()
        return np.asarray(jnp.asarray(output).astype(jnp.bfloat16).astype(jnp.float32)), np.zeros_like(state)


def errors(run: Run, sides: list[str]) -> None:
    """Relative RMS errors against float64 on the same bfloat16 inputs: output and every gradient."""
    print("| gate | strength | keys | beta | side | output | dquery | dkey | dvalue | dbeta | dg |\n" + "|---" * 11 + "|")
    some = [(gate, kind, "unit", "usual") for gate in ("head", "channel") for kind in GATE_KINDS if kind != "positive"]
    some += [(gate, "mild", keys, beta) for gate in ("head", "channel") for keys in KEY_KINDS for beta in BETA_KINDS]
    for row in dict.fromkeys([(None, "mild", "unit", "usual"), *some]):
        words = dict(zip(("gate", "strength", "keys", "beta"), map(str, row), strict=True))
        if not run.asks_for(" ".join(words.values()) + ";"):
            continue
        case = OutputAlone(
            "errors", batch=1, time=512, key_channels=64, value_channels=64, gate=row[0], gate_kind=row[1], key_kind=row[2],
            beta_kind=row[3], dtype="bfloat16",
        )  # fmt: skip
        want = functools.cache(case.expected)
        for label in sides:
            measure = lambda case=case, want=want, label=label: {"errors": errors_of(case, want(), label)}
            if (line := run.part(label, measure, what="errors", **words)) is not None:
                cells = [*words.values(), label, *(f"{e:.1e}" for e in line["errors"].values())]
                print("| " + " | ".join(cells) + " |", flush=True)


def errors_of(case: OutputAlone, want: dict[str, np.ndarray], label: str) -> dict[str, float]:
    """Of one side, by name."""
    make = functools.partial(fla, keep_tuning=True) if label == "fla" else SIDES[label]  # one shape, one tuning
    do = jnp.asarray(case.weights()[0]).astype(jnp.bfloat16)
    _, both, wait = make(dict(case.arguments()[0]), do, None)
    wait(result := both())
    got = named(result)
    names = [n for n in ("output", "query", "key", "value", "beta", "g") if n in got]
    return {n: relative_rms(got[n], want[n if n == "output" else f"d{n}"]) for n in names}


def measured(run: Run, name: str, kind: str, sides: dict[str, Callable[..., Calls]], kernels: bool) -> Line:
    """One row: by side its milliseconds (forward, forward + backward) and how far its results are from ours."""
    mine: dict[str, jax.Array] = {}

    def measure(side: str) -> dict[str, Any]:
        forward, both, wait = sides[side](*inputs(name, kind))
        found: dict[str, Any] = {"ms": (kernel_ms(forward, wait), kernel_ms(both, wait))}
        if kernels and side == "ours":
            print_kernels(both, wait)
        result = named(both())
        if side == "ours":
            mine.update(result)
        elif "ours" in sides:
            if not mine:  # measured by an earlier run
                mine.update(named(sides["ours"](*inputs(name, kind))[1]()))
            found["differs by"] = max(float(difference(result[n], mine[n])) for n in mine if n in result)
        return found

    lines = [run.part(side, functools.partial(measure, side), shape=name, gate=kind) for side in sides]
    return next(iter(by_row(filter(None, lines), "shape", "gate")), {"shape": name, "gate": kind})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    Run.add_options(parser, rows="'shape gate;', 'decode gate;'")
    parser.add_argument("--sides", nargs="+", default=list(SIDES), choices=list(SIDES))
    parser.add_argument("--kernels", action="store_true", help="ours, kernel by kernel")
    parser.add_argument("--cfg", type=json.loads, help="fields of a configuration for ours, as JSON")
    parser.add_argument("--errors", action="store_true", help="errors against float64 instead of times")
    parser.add_argument(
        "--decode-tiles", action="store_true", help="a step of decoding with every candidate of the tuner's instead"
    )
    parser.add_argument("--tiny", action="store_true", help="rows of 70 tokens: to try this script")
    options = parser.parse_args()
    run = Run(options)
    chosen = run.runnable([side for side in SIDES if side in options.sides], MISSING)
    if "fla" in chosen and not run.shows:
        tune_on_all_cores()
    if options.errors:
        errors(run, chosen)
        return
    if options.decode_tiles:
        decode_tiles(run)
        return
    if options.tiny:
        SHAPES.update({name: TINY for name in SHAPES if not name.startswith("packed")})
    cfg = None if options.cfg is None else GatedDeltaRuleConfig(**{"schedule": "chunked", "block_q": 64, **options.cfg})
    sides = {side: functools.partial(ours, cfg=cfg) if side == "ours" else SIDES[side] for side in chosen}
    if not options.tiny and "ours" in sides:
        decode(run)
    for name, kind in ROWS:
        if run.asks_for(f"{name} {kind};") and not (options.tiny and name.startswith("packed")):
            print(_line(measured(run, name, kind, sides, options.kernels)), flush=True)


def _line(row: Line) -> str:
    cells = [row["shape"], row["gate"]]
    for side in SIDES:
        if side in row:
            cells.append(side + " {:.3f} / {:.3f}".format(*row[side]["ms"]))
            if side != "ours" and "ours" in row:
                ratios = [ours / theirs for ours, theirs in zip(row["ours"]["ms"], row[side]["ms"], strict=True)]
                cells.append(f"{ratios[0]:.2f} / {ratios[1]:.2f}, differs by {row[side]['differs by']:.0e}")
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
