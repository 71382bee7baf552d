"""The schedule of every kernel for TPUs as the compiler wrote it, for chips that need not be here: never a measured time.

    PYTHONPATH=build/libtpu python -m benchmarks.tpu_bundles [--chips v5e v6e] [--shape BxTxHxKxV] [--calls recurrent:g]

`make test-tpu` installs libtpu there. A call is an operation and its gates, joined by `:`; all of them if none is named.

A line for each kernel, and for each way through its loop (chunks that are weakly gated, and others): bundles (very long
instructions, one a cycle) of a step of its grid less those that the steady state skips, how many of them store or load spilled
registers, VMEM in MiB, and estimated = bundles x steps / clock beside the time that the bytes of the kernel's operands and
results need. Memory traffic, stalls and the work of XLA around the kernels are not in it: it ranks tiles, and is optimistic as
a time.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ejkernel.testing.tpu_programs import CALLS, SETTINGS, named
from ejkernel.testing.tpu_schedules import kernels_of, schedules

SHAPE = "8x2048x16x128x128"
WAYS = ("weakly gated", "strongly gated")  # through the loops of the linear operations' kernels
COLUMNS = ("chip", "call", "kernel", "chunks", "bundles", "spills", "VMEM, MiB", "estimated, ms", "bytes, ms", "ratio")


def compile_here(chip: str, call: str, shape: str, tiles: dict[str, int]) -> None:
    """Compiles, and prints the steps and bytes of kernels. A process of its own: flags are read when libtpu is loaded."""
    import jax

    from ejkernel._device import on_device
    from ejkernel.kernels._pallas._chips import CHIPS

    program = named(call, shape)
    cfg = dataclasses.replace(program.candidates(chip)[0], **tiles) if tiles else None
    with on_device(CHIPS[chip].device):
        traced = jax.make_jaxpr(program.both(cfg))(program.arrays())
    program.compiled(chip, program.both(cfg))
    print(json.dumps(list(dict.fromkeys(kernels_of(traced.jaxpr)))))


def read(chip: str, call: str, shape: str, tiles: dict[str, int]) -> Iterator[dict[str, Any]]:
    """One object for each kernel of a call on a chip, and each way through it."""
    from ejkernel.kernels._pallas._chips import CHIPS

    with tempfile.TemporaryDirectory() as folder:
        flags = f"--xla_jf_dump_to={folder} --xla_jf_dump_llo_text=true"
        command = [sys.executable, "-m", "benchmarks.tpu_bundles", "--compile", chip, call, "--shape", shape]
        command += ["--tiles", json.dumps(tiles)]
        run = subprocess.run(command, env={**os.environ, **SETTINGS, "LIBTPU_INIT_ARGS": flags}, capture_output=True, text=True)
        if run.returncode:
            raise SystemExit(f"{call} for {chip}: {run.stderr.strip().splitlines()[-1]}")
        clock, bandwidth = CHIPS[chip].clock, CHIPS[chip].bandwidth
        for name, steps, moved in json.loads(run.stdout.strip().splitlines()[-1]):
            dump = re.compile(rf"-{name}(\.\d+)?-\d+-packed-bundles-post-ra\.txt$")
            path = max(p for p in Path(folder).iterdir() if dump.search(p.name))
            original = next(path.parent.glob(re.sub(r"-\d+-packed-bundles-post-ra\.txt$", "-02-original.txt", path.name)))
            ways = WAYS if name.startswith(("head_gate", "channel_gates")) else ()
            for plan in schedules(path.read_text(), original.read_text(), ways):
                estimated, needed = plan.bundles * steps / clock * 1e3, moved / bandwidth * 1e3
                facts = {"chip": chip, "call": call, "kernel": name, "steps": steps, **plan._asdict()}
                yield {**facts, "estimated_ms": estimated, "bytes_ms": needed, "ratio": estimated / needed}


def as_row(one: dict[str, Any]) -> str:
    cells = [one["chip"], f"`{one['call']}`", one["kernel"], one["way"] or "all", one["bundles"], one["spills"]]
    cells += [f"{one['vmem'] / 2**20:.1f}", f"{one['estimated_ms']:.2f}", f"{one['bytes_ms']:.2f}", f"{one['ratio']:.1f}"]
    return "| " + " | ".join(map(str, cells)) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chips", nargs="+", default=["v5e", "v6e"])
    parser.add_argument("--calls", nargs="+", default=CALLS)
    parser.add_argument("--shape", default=SHAPE)
    parser.add_argument("--tiles", type=json.loads, default={}, help='fields of the configuration, as {"block_q": 128}')
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--compile", nargs=2, metavar=("CHIP", "CALL"), help="used by the command itself")
    given = parser.parse_args()
    if given.compile:
        chip, call = given.compile
        compile_here(chip, call, given.shape, given.tiles)
        return
    if not given.json:
        print(f"| {' | '.join(COLUMNS)} |\n" + "|---" * len(COLUMNS) + "|")
    for chip in given.chips:
        for call in given.calls:
            for one in read(chip, call, given.shape, given.tiles):
                print(json.dumps(one) if given.json else as_row(one), flush=True)


if __name__ == "__main__":
    main()
