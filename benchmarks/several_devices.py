"""What is sent and computed where time is split over devices: counted in compiled programs, and modelled up to 1,024 GPUs.

python -m benchmarks.several_devices count     # bytes and operations on 1 to 16 simulated devices, against the formulas
python -m benchmarks.several_devices model     # the tables and the picture of docs/several_devices.md
"""

from __future__ import annotations

import functools
import math
import os
import re
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=16")

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from benchmarks.operations import counted
from ejkernel.kernels._linear import LinearProblem
from ejkernel.kernels._linear.config import Exchange
from ejkernel.modules import GatedDeltaRuleConfig, GLAttentionConfig, gated_delta_rule, gla_attention

DOCS = Path(__file__).parents[1] / "docs"
SHARED = PartitionSpec(None, "time")


def state_bytes(rows: int, heads: int, K: int, V: int) -> int:
    """An adjoint state, which the backward pass sends."""
    return 4 * rows * heads * K * V


def summary_bytes(operation: str, rows: int, heads: int, K: int, V: int) -> int:
    """A shard's summary, which the forward pass sends: U, and decays per key channel, or the delta rule's matrix."""
    return state_bytes(rows, heads, K, V) + 4 * rows * heads * (K * K if operation == "delta" else K + 1)


def program(
    operation: str, devices: int, exchange: Exchange | None, tokens: int, heads: int, K: int, gradient: bool = True
) -> Any:
    """The compiled program; exchange None: on one device, whole."""
    names = ("query", "key", "value", "g", *(("beta",) if operation == "delta" else ()))
    shape = {name: (1, tokens, heads) if name == "beta" else (1, tokens, heads, K) for name in names}
    mesh = jax.make_mesh((devices,), ("time",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    call: Any = gated_delta_rule if operation == "delta" else gla_attention
    kind: Any = GatedDeltaRuleConfig if operation == "delta" else GLAttentionConfig
    cfg = kind(block_q=64, platform="xla", exchange=exchange)
    run = lambda arrays: call(**arrays, cfg=cfg)
    if exchange is not None:
        local = lambda arrays: call(**arrays, cfg=cfg, sequence_axis="time")
        run = jax.shard_map(local, mesh=mesh, in_specs=(dict.fromkeys(names, SHARED),), out_specs=SHARED)
    whole = lambda arrays: jax.vjp(run, arrays)[1](jnp.ones_like(arrays["value"])) if gradient else run(arrays)
    placed = NamedSharding(mesh, SHARED if exchange else PartitionSpec())
    arrays = {name: jax.ShapeDtypeStruct(x, jnp.float32, sharding=placed) for name, x in shape.items()}
    return jax.jit(whole).lower(arrays).compile()


def received(text: str, devices: int) -> int:
    """Bytes that a device receives: of gathered arrays all but its own part, of permuted ones all."""
    total = 0
    for sizes, operation in re.findall(r"= f32\[([\d,]*)\]\S* (all-gather|collective-permute)\(", text):
        size = 4 * math.prod(int(n) for n in sizes.split(","))
        total += size * (devices - 1) // devices if operation == "all-gather" else size
    return total


def expected(operation: str, devices: int, exchange: str, heads: int, K: int) -> int:
    """The formula: every other shard's summary and adjoint state, or one of each for every step and one more."""
    times = devices - 1 if exchange == "gather" else (devices - 1).bit_length() + 1
    return times * (summary_bytes(operation, 1, heads, K, K) + state_bytes(1, heads, K, K))


def count() -> None:
    heads, K, tokens = 2, 32, 1024
    print("| operation | devices | exchange | bytes received per layer, forward and backward | formula |")
    print("|---|---|---|---|---|")
    cases: list[tuple[int, Exchange]] = [(n, "gather") for n in (2, 4, 8, 16)]
    cases += [(n, "steps") for n in (8, 16)]
    for operation in ("gla", "delta"):
        for devices, exchange in cases:
            found = received(program(operation, devices, exchange, tokens, heads, K).as_text(), devices)
            wanted = expected(operation, devices, exchange, heads, K)
            print(f"| {operation} | {devices} | {exchange} | {found:,} | {wanted:,} |", flush=True)
    work()


def work() -> None:
    """Operations of a shard of 8 against an eighth of the whole."""
    tokens, heads, channels = 8192, 2, 64
    for operation in ("gla", "delta"):
        trips = functools.partial(loop_length, heads=heads, K=channels) if operation == "gla" else lambda tokens: 0
        for gradient in (False, True):
            measure = functools.partial(program, operation, tokens=tokens, heads=heads, K=channels, gradient=gradient)
            split = counted(measure(8, "gather").as_text(), trips(tokens // 8))
            whole = counted(measure(1, None).as_text(), trips(tokens))
            print(f"{operation}, {'forward and backward' if gradient else 'forward'}: {8 * split / whole:.2f} of an eighth")


def loop_length(tokens: int, heads: int, K: int) -> int:
    """Of the linear operations on xla, whose loops take several chunks at a time."""
    from ejkernel.kernels._xla.linear._solve import _plan

    row: Any = jax.ShapeDtypeStruct((1, tokens, heads, K), jnp.float32)
    plan = _plan(LinearProblem(row, row, row, gk=row), GLAttentionConfig(block_q=64))
    return -(-tokens // (plan.rows * plan.chunks))


# Model: gates per key channel in bfloat16, one layer of 16 heads, K = V = 128, one sequence of 2**20 tokens.
TOKENS, HEADS, K = 1 << 20, 16, 128
RECURRENCE = 0.966e-3 / 16384  # seconds per token forward and backward, measured on an H200 (benchmarks/RESULTS.md)
READ = 2 * 3 * HEADS * K * 2 / 4.3e12  # seconds per token that the two summaries read: three bfloat16 rows each
NVLINK, NETWORK = 450e9, 50e9  # bytes per second of a GPU inside a node of 8, and between nodes
LATENCY_INSIDE, LATENCY = 3e-6, 10e-6  # seconds of one message


def exchange_seconds(devices: int, exchange: str) -> float:
    """Forward and backward."""
    bandwidth, latency = (NVLINK, LATENCY_INSIDE) if devices <= 8 else (NETWORK, LATENCY)
    sent = summary_bytes("gla", 1, HEADS, K, K) + state_bytes(1, HEADS, K, K)
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
    taken = gather if devices <= 16 else steps
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
    {"count": count, "model": model}[sys.argv[1]]()
