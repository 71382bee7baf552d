"""Registers, shared memory and spills of every kernel that the triton platform launches, compiled for a GPU that need not
be here (no CUDA plugin either):

    python -m benchmarks.triton_resources [--capability 80 90] [--calls gk g ...] [--candidates] [--json]

A table with one line for each kernel of each call (of `EVERY`; all), or with --json one object a line. Kernels are compiled
only where Triton does not interpret them: TRITON_INTERPRET must not be set. Spills are bytes of stack frame a thread.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.testing.triton_calls import (
    ATTENTION_CALLS,
    CALLS,
    CONVOLUTION_CALLS,
    DELTA_CALLS,
    EVERY,
    arguments,
    attention_arguments,
    convolution_arguments,
    delta_arguments,
)

_TILES = ("BA", "BB", "BC", "BD", "B2", "BK", "BM", "BN", "BV", "C")  # constants that are shown


def resources(kernel: Any) -> dict[str, int]:
    """registers, spills (bytes of stack frame), shared (bytes) of a compiled kernel."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    find = lambda name: int(re.search(rf"\b{name}:(\d+)", text).group(1))  # type: ignore[union-attr]
    return {"registers": find("REG"), "spills": find("STACK"), "shared": kernel.metadata.shared}


def kernels_of(function: Any, arguments: Any, capability: int) -> list[tuple[str, dict[str, int]]]:
    """(name, resources) of every kernel that tracing `function(*arguments)` compiles. Needs no CUDA plugin."""
    from ejkernel.callib import _compiled, compile_for

    seen: list[tuple[str, dict[str, int]]] = []
    original = _compiled.run_compiled

    def compile_only(kernel: Any, names: Any, args: Any, outputs: Any, _: Any, constants: Any, *rest: Any) -> Any:
        (options,) = (x for x in rest if isinstance(x, _compiled.Options))
        signature, absent = _compiled.signature_of(names, [*args, *outputs])
        everything = {**constants, **absent}
        asked = _compiled.compile_kernel(kernel, signature, tuple(sorted(everything.items())), options, capability)
        compiled = _compiled.compile_to_fit(kernel, signature, everything, options, capability)
        tiles = " ".join(f"{k}={v}" for k, v in sorted(constants.items()) if k in _TILES)
        used = {**resources(compiled), "lowered": compiled is not asked}  # has fewer stages than it was to have
        seen.append((f"{kernel.fn.__name__}[{tiles}, {options.num_warps} warps]", used))
        return [jnp.zeros(x.shape, x.dtype) for x in outputs]

    _compiled.run_compiled = compile_only  # type: ignore[assignment]
    try:
        jax.clear_caches()
        with compile_for(capability):
            jax.make_jaxpr(function)(*arguments)
    finally:
        _compiled.run_compiled = original
    return seen


def report(capability: int, calls: list[str], every_candidate: bool = False) -> Iterator[dict[str, Any]]:
    """One entry for each kernel of these calls, forward and backward; "... forward" alone; of the call "decode", a step.

    Args:
        every_candidate: with each configuration that the tuner would try, instead of the default alone.
    """
    from ejkernel.callib import compile_for
    from ejkernel.modules import causal_conv1d

    for name in calls:
        if name in CONVOLUTION_CALLS:
            run = functools.partial(_gradient, function=functools.partial(causal_conv1d, activation="silu"))
            yield from _entries(name, run, convolution_arguments(*CONVOLUTION_CALLS[name]), capability, "")
            continue
        function, make, (arrays, others, options) = _call(name)
        with compile_for(capability):
            problem = jax.eval_shape(lambda a, b, make=make, options=options: make(**a, **b, **options), arrays, others)
            tried = function.implementation.candidates(problem)[: None if every_candidate else 1]
        for cfg in tried:
            way = _forward if name.endswith(("decode", "forward")) else _gradient
            run = functools.partial(way, function=functools.partial(function, cfg=cfg, **options))
            yield from _entries(name, run, (arrays, others), capability, _changed(cfg))


def _entries(name: str, run: Any, arguments: Any, capability: int, config: str) -> Iterator[dict[str, Any]]:
    """One entry for each kernel, however often it is traced."""
    for kernel, used in dict.fromkeys((k, tuple(u.items())) for k, u in kernels_of(run, arguments, capability)):
        yield {"capability": capability, "call": name, "kernel": kernel, **dict(used), "config": config}


def _forward(arrays: Any, others: Any, function: Any) -> Any:
    return function(**arrays, **others)


def _gradient(arrays: Any, others: Any, function: Any) -> Any:
    loss = lambda a: sum(x.astype(jnp.float32).sum() for x in jax.tree.leaves(function(**a, **others)))
    return jax.grad(loss)(arrays)


def _call(name: str) -> tuple[Any, Any, Any]:
    """(the platform's function, what makes a problem of its arguments, arrays and others and options)."""
    from ejkernel.kernels._attention import AttentionProblem
    from ejkernel.kernels._delta import DeltaProblem
    from ejkernel.kernels._linear.operations import recurrent as recurrent_problem
    from ejkernel.kernels._triton import attention, gated_delta_rule, recurrent

    if name in ATTENTION_CALLS:
        return attention, AttentionProblem.from_arguments, attention_arguments(*ATTENTION_CALLS[name])
    if name in DELTA_CALLS:
        return gated_delta_rule, DeltaProblem.from_arguments, (delta_arguments(*DELTA_CALLS[name]), {}, {})
    arrays = arguments(*CALLS.get(name, (("g", "gk", "gv", "g_gamma"), 128, 128, "bfloat16")))
    if name == "decode":
        arrays = {n: x if n == "g_gamma" else jax.ShapeDtypeStruct(_step(n, x.shape), x.dtype) for n, x in arrays.items()}
    return recurrent, recurrent_problem, (arrays, {}, {})


def _step(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    return shape if name == "initial_state" else (shape[0], 1, *shape[2:])


def _changed(cfg: Any) -> str:
    """The fields that are given."""
    tiles = ("block_q", "block_k", "block_d", "num_warps", "num_stages")
    return " ".join(f"{n}={getattr(cfg, n)}" for n in ("schedule", *tiles) if getattr(cfg, n, None) is not None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--capability", type=int, nargs="+", default=[80, 90], help="80: A100, 90: H100 and H200")
    parser.add_argument("--calls", nargs="+", default=EVERY, choices=EVERY, metavar="CALL")
    parser.add_argument("--candidates", action="store_true", help="with every configuration that the tuner would try")
    parser.add_argument("--json", action="store_true", help="one object a line")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") == "1":
        raise SystemExit("TRITON_INTERPRET=1 is set, and interpreted kernels cannot be compiled.")
    if not options.json:
        print(f"{'sm':>3} {'call':12} {'kernel':45} {'registers':>9} {'shared':>7} {'spills':>7}  configuration")
    for capability in options.capability:
        for e in report(capability, options.calls, options.candidates):
            numbers = f"{e['registers']:9} {e['shared']:7} {e['spills']:7}"
            line = f"{capability:3} {e['call']:12} {e['kernel']:45} {numbers}  {e['config']}"
            print(json.dumps(e) if options.json else line, flush=True)


if __name__ == "__main__":
    main()
