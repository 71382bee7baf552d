"""What is sent and computed where time is split over devices: counted in compiled programs, and modelled up to 1,024 GPUs.

python -m benchmarks.several_devices count     # bytes and operations on 1 to 16 simulated devices, against the formulas
python -m benchmarks.several_devices seconds   # processor time of 8 shards against that of the whole
python -m benchmarks.several_devices model     # the tables and the picture of docs/several_devices.md
"""

from __future__ import annotations

import dataclasses
import math
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=16")

import jax
import jax.numpy as jnp

from ejkernel.kernels._linear.config import Exchange
from ejkernel.parallel.exchange import MOST_GATHERED
from ejkernel.testing.split_programs import Gates, SplitProgram, state_bytes, summary_bytes

DOCS = Path(__file__).parents[1] / "docs"
GATES: tuple[Gates, ...] = ("head", "channel", "delta", "delta-channel")


def count() -> None:
    print("| gates | devices | exchange | bytes received per layer, forward and backward | formula |")
    print("|---|---|---|---|---|")
    cases: list[tuple[int, Exchange]] = [(n, "gather") for n in (1, 2, 4, 8, 16)]
    cases += [(n, "steps") for n in (1, 2, 8, 16)]
    for gates in GATES:
        for devices, exchange in cases:
            program = SplitProgram(gates, 1024, devices, exchange, channels=32)
            print(f"| {gates} | {devices} | {exchange} | {program.received():,} | {program.formula():,} |", flush=True)
    work()


def work() -> None:
    """Operations of a shard of 8 against an eighth of the whole."""
    for gates in GATES:
        for tokens in (8192, 32768):
            split = SplitProgram(gates, tokens, 8, "gather")
            whole = dataclasses.replace(split, devices=1, exchange=None)
            ratio = 8 * split.operations() / whole.operations()
            print(f"{gates}, {tokens} tokens, forward and backward: {ratio:.2f} of an eighth", flush=True)


def seconds() -> None:
    """Processor time of all shards together against the whole call's, forward and backward."""
    for gates in GATES:
        split = SplitProgram(gates, 32768, 8, "gather")
        spent = [_processor_seconds(each) for each in (split, dataclasses.replace(split, devices=1, exchange=None))]
        print(f"{gates}: {spent[0]:.2f} s on 8 devices, {spent[1]:.2f} s on one, {spent[0] / spent[1]:.2f} times", flush=True)


def _processor_seconds(program: SplitProgram, runs: int = 7) -> float:
    """Of one run, all threads together: the least of some."""
    compiled, shapes = program.compiled(), program.arrays()
    keys = jax.random.split(jax.random.key(0), len(shapes))
    drawn = {name: jax.random.normal(key, x.shape) for key, (name, x) in zip(keys, shapes.items(), strict=True)}
    gates = {"g": jax.nn.log_sigmoid(drawn["g"])} | ({"beta": jax.nn.sigmoid(drawn["beta"])} if program.delta else {})
    unit = {name: drawn[name] / jnp.linalg.norm(drawn[name], axis=-1, keepdims=True) for name in ("query", "key")}
    placed = {name: jax.device_put(x, shapes[name].sharding) for name, x in {**drawn, **gates, **unit}.items()}
    spent = []
    for _ in range(runs):
        begun = time.process_time()
        jax.block_until_ready(compiled(placed))
        spent.append(time.process_time() - begun)
    return min(spent)


# Model: gates per key channel in bfloat16, one layer of 16 heads, K = V = 128, one sequence of 2**20 tokens.
TOKENS, HEADS, K = 1 << 20, 16, 128
RECURRENCE = 0.714e-3 / 16384  # seconds per token forward and backward, measured on an H200 (benchmarks/RESULTS.md)
READ = 2 * 3 * HEADS * K * 2 / 4.3e12  # seconds per token that the two summaries read: three bfloat16 rows each
NVLINK, NETWORK = 450e9, 50e9  # bytes per second of a GPU inside a node of 8, and between nodes
LATENCY_INSIDE, LATENCY = 3e-6, 10e-6  # seconds of one message


def exchange_seconds(devices: int, exchange: str) -> float:
    """Forward and backward."""
    bandwidth, latency = (NVLINK, LATENCY_INSIDE) if devices <= 8 else (NETWORK, LATENCY)
    sent = summary_bytes("channel", HEADS, K, K) + state_bytes(HEADS, K, K)
    if devices == 1:
        return 0.0
    if exchange == "gather":
        return (devices - 1) * sent / bandwidth + 2 * math.log2(devices) * latency
    return (math.log2(devices) + 1) * (sent / bandwidth + 2 * latency)


def model_row(devices: int) -> tuple[float, ...]:
    """Milliseconds of recurrence, summaries, both exchanges; speed-up over one GPU."""
    tokens = TOKENS / devices
    recurrence, summaries = tokens * RECURRENCE, tokens * READ if devices > 1 else 0.0
    gather, steps = (exchange_seconds(devices, how) for how in ("gather", "steps"))
    taken = gather if devices <= MOST_GATHERED else steps
    speed = TOKENS * RECURRENCE / (recurrence + summaries + taken)
    return recurrence * 1e3, summaries * 1e3, gather * 1e3, steps * 1e3, speed


def model_table() -> str:
    lines = ["| GPUs | tokens each | recurrence, ms | summaries, ms | gather, ms | steps, ms | speed-up |", "|" + "---|" * 7]
    for devices in (1 << n for n in range(11)):
        *times, speed = model_row(devices)
        lines.append(f"| {devices} | {TOKENS // devices:,} | {' | '.join(f'{ms:.3f}' for ms in times)} | {speed:.0f} |")
    return "\n".join(lines) + "\n"


def model() -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    (DOCS / "tables" / "several_devices.md").write_text(model_table(), encoding="utf-8")
    devices = [1 << n for n in range(11)]
    figure, axes = pyplot.subplots(figsize=(6, 3.6), layout="constrained")
    rows = list(zip(*map(model_row, devices), strict=True))
    for label, row in zip(("recurrence", "summaries", "exchange: gather", "exchange: steps"), rows[:4], strict=True):
        axes.plot(devices, [x or math.nan for x in row], marker="o", markersize=3, label=label)
    axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="ms per layer, forward and backward")
    axes.set_xticks(devices[::2], [str(n) for n in devices[::2]])
    axes.minorticks_off()
    axes.legend(frameon=False)
    figure.savefig(DOCS / "pictures" / "several_devices_model.png", dpi=120)
    print(model_table())


if __name__ == "__main__":
    {"count": count, "seconds": seconds, "model": model}[sys.argv[1]]()
