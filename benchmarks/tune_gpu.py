"""Tunes every operation on the GPU at hand and writes the winners as the package ships them.

    python -m benchmarks.tune_gpu [--of linear delta attention] [--rows TEXT ...] [--seconds 20] [--jobs 15] [--forward]
                                  [--out FILE] [--json FILE] [--seconds-in-all S]
    python -m benchmarks.tune_gpu --compile-for 90 [--of ...] [--rows TEXT ...] [--jobs 15]      compiles only, on any machine

The calls are those of the benchmarks `linear_attention_gpu`, `delta_rule_gpu`, `attention_options_gpu`, and steps of decoding.
Kernels of all candidates are compiled first, by `--jobs` processes into Triton's cache; then the library's tuner races the
candidates, call by call, forward and backward together (a configuration is stored per call, whether or not it is
differentiated), steps of decoding forward only. `--forward` races the forward of all, to see what that would choose; it writes
only where `--out` says. Without `--out` the file is ejkernel/ops/defaults/<device>.json; entries of other calls in it stay.
Of the recurrences Triton's candidates race alone, of attention those of all platforms: what wins is what `auto` takes.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from benchmarks import attention_rows
from ejkernel._device import Device, on_device
from ejkernel.modules import Attention
from ejkernel.ops import ConfigCache, Invocation, Tuner
from ejkernel.ops.config.codec import to_fields
from ejkernel.ops.config.shipped import FOLDER, device_name
from ejkernel.ops.key import device_kind
from ejkernel.testing import delta_gpu, linear_gpu
from ejkernel.testing.bench_run import Run, asked_for
from ejkernel.testing.shipping import Arrays, delta_invocations, invocations, tune_call, write

Options = dict[str, Any]


class Family(NamedTuple):
    """What is tuned of a family: its calls by name (arrays as shapes, options), and how the operations make one."""

    calls: Callable[[], dict[str, tuple[Arrays, Options]]]
    invocations: Callable[..., list[Invocation]]
    function: str  # the platform-level one


class Call(NamedTuple):
    """One call: its arguments, the operations that make it, the platform-level function, whether gradients are left out."""

    arrays: Arrays
    options: Options
    invocations: list[Invocation]
    function: str
    forward_only: bool


def _plain(calls: Callable[[], dict[str, Arrays]]) -> Callable[[], dict[str, tuple[Arrays, Options]]]:
    return lambda: {name: (arrays, {}) for name, arrays in calls().items()}


FAMILIES = {
    "linear": Family(_plain(linear_gpu.calls), invocations, "recurrent"),
    "delta": Family(_plain(delta_gpu.calls), delta_invocations, "gated_delta_rule"),
    "attention": Family(
        attention_rows.calls,
        lambda arrays, **options: [Invocation.of(Attention(), **arrays, **options, platform=None)],
        "attention",
    ),
}


def _on_cpu() -> None:
    jax.config.update("jax_platforms", "cpu")  # the GPU belongs to the process that measures


def compile_candidate(function: str, arrays: Arrays, options: Options, cfg: Any, capability: int, forward_only: bool) -> int:
    """Compiles what one candidate launches into Triton's cache; gives the number of kernels."""
    from benchmarks.triton_resources import kernels_of
    from ejkernel.kernels import _triton

    is_float = lambda x: isinstance(x, jax.ShapeDtypeStruct) and jnp.issubdtype(x.dtype, jnp.floating)
    floats = {name: x for name, x in arrays.items() if is_float(x)}
    others = {name: x for name, x in arrays.items() if name not in floats}
    solve = getattr(_triton, function)

    def run(floats: Arrays, others: Arrays) -> Any:
        solved = lambda floats: solve(**floats, **others, **options, cfg=cfg)[0]
        if forward_only:
            return solved(floats)
        out, pull = jax.vjp(solved, floats)
        return out, pull(out)

    return len(kernels_of(run, (floats, others), capability))


def compile_all(chosen: dict[str, Call], capability: int, jobs: int) -> None:
    """Compiles every candidate of every call, `jobs` at a time. One that does not compile is reported here, and again by the
    tuner, which rejects it."""
    begin, count = time.monotonic(), 0
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_on_cpu) as pool:
        waiting = {
            pool.submit(compile_candidate, call.function, call.arrays, call.options, cfg, capability, call.forward_only): (
                name,
                cfg,
            )
            for name, call in chosen.items()
            for cfg in call.invocations[0].kernel.candidate_cfgs(call.invocations[0])
            if cfg.platform == "triton"
        }
        for done in as_completed(waiting):
            if (error := done.exception()) is not None:
                print(f"{waiting[done]}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
            else:
                count += done.result()
    print(f"compiled {count} kernels of {len(waiting)} candidates in {time.monotonic() - begin:.0f} s", flush=True)


def chosen_calls(options: argparse.Namespace) -> dict[str, Call]:
    """The calls that are asked for, by family and name."""
    return {
        f"{label}: {name}": Call(
            arrays, static, family.invocations(arrays, **static), family.function,
            options.forward or name.startswith("decode"),
        )
        for label, family in FAMILIES.items()
        if label in options.of
        for name, (arrays, static) in family.calls().items()
        if asked_for(options.rows, f"{label}: {name}")
    }  # fmt: skip


def raced(call: Call, tuner: Tuner, cache: ConfigCache, file: Path | None) -> dict[str, Any]:
    """Tunes a call and adds the winner to the file: what is measured is kept if a later call fails."""
    record = tune_call(call.invocations, tuner, call.forward_only, cache)
    for candidate in record["candidates"]:
        if "reason" in candidate:
            print(f"  rejected {candidate['config']}: {candidate['reason']}", file=sys.stderr)
    if file is not None:
        write(file, device_kind(jax.devices()[0]), cache)
    differing = {n: x for n, x in to_fields(record["config"]).items() if x != record["heuristic"][n]}
    return {"heuristic": record["heuristic_seconds"] * 1e3, "winner": record["seconds"] * 1e3, "differing": differing}


def options_given() -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    Run.add_options(parser, rows="'family: call'")
    parser.add_argument("--of", nargs="+", default=list(FAMILIES), choices=list(FAMILIES), help="whose calls")
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        help="the longest that racing one call may take; twice, then four times as long where it did not get to all",
    )
    parser.add_argument("--jobs", type=int, default=15, help="processes that compile; 0: compile while racing")
    parser.add_argument("--forward", action="store_true", help="race the forward alone")
    parser.add_argument("--out", type=Path, help="where the winners go")
    parser.add_argument("--compile-for", type=int, metavar="CAPABILITY", help="compile for such a GPU, which need not be here")
    return parser, parser.parse_args()


def table(run: Run, races: dict[str, Callable[[], dict[str, Any]]]) -> None:
    """A line for each call."""
    print("| call | heuristic ms | winner ms | gain | fields that differ |\n|---|---|---|---|---|")
    for name, race in races.items():
        if (found := run.part("triton", race, call=name)) is not None:
            slow, fast, differing = found["heuristic"], found["winner"], found["differing"] or "-"
            print(f"| {name} | {slow:.3f} | {fast:.3f} | {1 - fast / slow:.0%} | {differing} |", flush=True)


def main() -> None:
    parser, options = options_given()
    if options.compile_for is not None:
        with on_device(Device("gpu", "NVIDIA H200", options.compile_for)):
            compile_all(chosen_calls(options), options.compile_for, options.jobs)
        return
    device = jax.devices()[0]
    if device.platform != "gpu" and not options.show:
        parser.error(f"this tunes for NVIDIA GPUs; JAX has {device}")
    if options.show:
        names = [f"{label}: {name}" for label in options.of for name in FAMILIES[label].calls()]
        table(Run(options), {name: dict for name in names if asked_for(options.rows, name)})
        return
    run, chosen = Run(options), chosen_calls(options)
    file = options.out or (None if options.forward else FOLDER / f"{device_name(device_kind(device))}.json")
    if run.results.lines and not (file is None or file.exists()):
        parser.error(f"--json {options.json} has calls whose winners were written to {file}, which is gone")
    if options.jobs:
        left = {name: call for name, call in chosen.items() if not run.knows("triton", call=name)}
        compile_all(left, int(device.compute_capability.replace(".", "")), options.jobs)
    tuner, cache = Tuner(warmup=2, iters=7, max_seconds=options.seconds, candidate_seconds=options.seconds / 2), ConfigCache()
    table(run, {name: functools.partial(raced, call, tuner, cache, file) for name, call in chosen.items()})
    if file is not None:
        print(f"{len(list(cache.items()))} new entries in {file}")


if __name__ == "__main__":
    main()
