"""Kernels launched in another way, beside how they are launched: milliseconds on a GPU, and whether the results are the same.

    python -m benchmarks.launch_variants_gpu [--rows TEXT ...] [--json FILE] [--seconds-in-all S]
    python -m benchmarks.ahead launch_variants_gpu             compiles them, on any machine

The variants are those of ejkernel/testing/launch_variants.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import jax

from benchmarks import delta_rule_gpu, linear_attention_gpu
from benchmarks.kernel_times import Calls, difference, kernel_ms, named, print_kernels
from ejkernel.testing.bench_run import Run
from ejkernel.testing.launch_variants import VARIANTS, Variant, launched
from ejkernel.testing.results import Line

SIDES: dict[str, Callable[[str, str], Calls]] = {
    "linear": lambda shape, gate: linear_attention_gpu.ours(*linear_attention_gpu.inputs_of(shape, gate)),
    "delta": lambda shape, gate: delta_rule_gpu.ours(*delta_rule_gpu.inputs(shape, gate)),
}


def measured(run: Run, family: str, shape: str, gate: str, variant: Variant | None, kernels: bool) -> Line | None:
    """A call's milliseconds, forward and forward + backward; of a variant also how far its results are from the usual ones."""

    def usual() -> tuple[Calls, dict[str, jax.Array]]:
        calls = SIDES[family](shape, gate)
        return calls, named(calls[1]())

    def measure() -> dict[str, Any]:
        if variant is None:
            return timed(usual()[0])
        with launched(variant) as changed:
            calls, got = usual()
            found = timed(calls)
        if not changed:
            raise ValueError(f"{variant.kernel} is not launched by this call, or not to be changed")
        _, want = usual()
        return {**found, "differs by": max(float(difference(got[n], want[n])) for n in want)}

    def timed(calls: Calls) -> dict[str, Any]:
        forward, both, wait = calls
        if kernels:
            print_kernels(both, wait)
        return {"ms": (kernel_ms(forward, wait), kernel_ms(both, wait))}

    side = "usual" if variant is None else f"{variant.kernel}: {variant.name}"
    return run.part(side, measure, call=f"{family}: {shape} {gate}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    Run.add_options(parser, rows="'kernel: variant; family: shape gate;'")
    parser.add_argument("--kernels", action="store_true", help="kernel by kernel")
    options = parser.parse_args()
    run = Run(options)
    print("| call | variant | as it is | so | differs by |\n" + "|---" * 5 + "|")
    for variant in VARIANTS:
        for call in variant.calls:
            if not run.asks_for(f"{variant.kernel}: {variant.name}; {call[0]}: {call[1]} {call[2]};"):
                continue
            lines = [measured(run, *call, which, options.kernels) for which in (None, variant)]
            before, so = ("{:.4f} / {:.4f}".format(*line["ms"]) if line else "-" for line in lines)
            apart = f"{lines[1]['differs by']:.1e}" if lines[1] else "-"
            print(f"| {' '.join(call)} | {variant.kernel}: {variant.name} | {before} | {so} | {apart} |", flush=True)


if __name__ == "__main__":
    main()
