"""The linear operations against the hand-written scan and its autodiff, as ratios in one run.

    python -m benchmarks.linear_attention_cpu [--quick]

float32, B = 2, H = 4. Forward computes the output; forward+backward the output and the gradients of all inputs.
"""

from __future__ import annotations

import argparse
import datetime
import platform

import jax
import jax.numpy as jnp

from ejkernel.modules import recurrent_attention
from ejkernel.testing.hand_written import decode_step, scan_attention
from ejkernel.testing.shapes import Shape
from ejkernel.testing.timing import best_times, directed

GATES = {"no gate": (), "scalar": ("g",), "per key": ("gk",), "per value": ("gv",), "key and value": ("gk", "gv")}
ROWS = [
    (64, 2048, ("forward",), tuple(GATES)),
    (64, 8192, ("forward", "forward+backward"), tuple(GATES)),
    (128, 8192, ("forward", "forward+backward"), ("no gate", "scalar", "per key")),
]
QUICK = [(64, 1024, ("forward", "forward+backward"), ("no gate", "scalar", "per key", "key and value"))]


def measure(channels: int, tokens: int, direction: str, kind: str, seconds: float = 3.0) -> tuple[float, float]:
    """(seconds of ours, seconds of the scan)."""
    shape = Shape(2, tokens, 4, channels, channels, GATES[kind])
    times = best_times(
        {
            "ours": directed(recurrent_attention, direction),
            "scan": directed(lambda **a: scan_attention(**a)[0], direction),
        },
        shape.arrays(),
        shape.cotangent(),
        seconds=seconds,
    )
    return times["ours"], times["scan"]


def per_token() -> list[tuple[str, str, float]]:
    """Cost at T = 65536 over T = 2048, of packing over the dense call, of a decode step over one by hand."""
    found = []
    for kind in ("scalar", "per key"):
        each = {}
        for tokens in (2048, 65536):
            arrays = Shape(1, tokens, 4, 64, 64, GATES[kind]).arrays()
            each[tokens] = best_times({"t": lambda a: recurrent_attention(**a)}, arrays, seconds=2)["t"] / tokens
        found.append((f"time per token at T=65536 over T=2048, {kind}", "<= 1.3", each[65536] / each[2048]))
        shape = Shape(1, 8192, 4, 64, 64, GATES[kind])
        offsets = jnp.array([0, 100, 100, 1700, 1701, 3000, 5500, 5900, 8192], jnp.int32)
        for direction in ("forward", "forward+backward"):
            dense = directed(recurrent_attention, direction)
            packed = directed(lambda **a: recurrent_attention(**a, cu_seqlens=offsets), direction)  # noqa: B023
            times = best_times({"dense": dense, "packed": packed}, shape.arrays(), shape.cotangent())
            found.append((f"8 packed sequences over dense, {direction}, {kind}", "<= 1.5", times["packed"] / times["dense"]))
    arrays = Shape(2, 1, 4, 64, 64, ("gk",)).arrays()
    state = jnp.ones((2, 4, 64, 64))
    ours = lambda state, query, key, value, gk: recurrent_attention(
        query, key, value, gk=gk, initial_state=state, return_state=True, softmax_scale=64**-0.5
    )
    times = best_times({"ours": ours, "hand": decode_step}, state, *arrays.values(), seconds=1, rounds=2000)
    found.append(("decode step over a hand-written one", "<= 1", times["ours"] / times["hand"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a few small shapes")
    quick = parser.parse_args().quick
    print(f"{datetime.date.today()}, {platform.machine()} CPU, jax {jax.__version__}, Python {platform.python_version()}\n")
    print("| K = V | T | gates | direction | scan, ms | ejkernel, ms | times faster |")
    print("|---|---|---|---|---|---|---|")
    for channels, tokens, ways, kinds in QUICK if quick else ROWS:
        for kind in kinds:
            for direction in ways:
                ours, scan = measure(channels, tokens, direction, kind)
                times = f"{scan * 1e3:.1f} | {ours * 1e3:.1f} | {scan / ours:.1f}"
                print(f"| {channels} | {tokens} | {kind} | {direction} | {times} |", flush=True)
    if not quick:
        print("\n| what | wanted | measured |\n|---|---|---|")
        for what, wanted, ratio in per_token():
            print(f"| {what} | {wanted} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
