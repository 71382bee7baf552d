"""Registers, shared memory and spills of every kernel that the triton platform launches, compiled for a GPU that need not
be here. Run as a program, since kernels are compiled only where Triton does not interpret them:

    python -m tests.triton.resources 90 [call ...]          one JSON line for each kernel of each call (of `CALLS`; all)
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

CALLS = {  # name: (gates, K, V, dtype)
    "none": ((), 128, 128, "bfloat16"),
    "g": (("g",), 128, 128, "bfloat16"),
    "g_gamma": (("g_gamma",), 64, 64, "bfloat16"),
    "gk": (("gk",), 128, 128, "bfloat16"),
    "gk wide": (("gk",), 256, 512, "bfloat16"),
    "g wide": (("g",), 512, 320, "bfloat16"),
    "gk gv": (("gk", "gv"), 64, 96, "bfloat16"),
    "all float32": (("g", "gk", "gv", "g_gamma"), 64, 64, "float32"),
    "g float16": (("g",), 64, 64, "float16"),
}


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
    from ejkernel.callib import _compiled

    seen: list[tuple[str, dict[str, int]]] = []
    original = _compiled.run_compiled

    def compile_only(kernel: Any, names: Any, args: Any, outputs: Any, _: Any, constants: Any, *rest: Any) -> Any:
        *_, options, _ = rest
        signature, absent = _compiled.signature_of(names, [*args, *outputs])
        compiled = _compiled.compile_kernel(
            kernel, signature, tuple(sorted({**constants, **absent}.items())), options, capability
        )
        tiles = " ".join(f"{k}={v}" for k, v in sorted(constants.items()) if k in ("BA", "BB", "BD", "B2", "BK", "BV", "C"))
        seen.append((f"{kernel.fn.__name__}[{tiles}, {options.num_warps} warps]", resources(compiled)))
        return [jnp.zeros(x.shape, x.dtype) for x in outputs]

    _compiled.run_compiled = compile_only
    try:
        jax.clear_caches()
        jax.make_jaxpr(function)(*arguments)
    finally:
        _compiled.run_compiled = original
    return seen


def arguments(gates: tuple[str, ...], K: int, V: int, dtype: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Two rows of 1000 tokens, four heads over two."""
    B, T, H, Hkv = 2, 1000, 4, 2
    of = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct(shape, dtype)
    gate = {"g": of(B, T, H, dtype="float32"), "gk": of(B, T, Hkv, K), "gv": of(B, T, H, V), "g_gamma": of(H, dtype="float32")}
    arrays = {"query": of(B, T, H, K), "key": of(B, T, Hkv, K), "value": of(B, T, Hkv, V)}
    return arrays | {n: gate[n] for n in gates} | {"initial_state": of(B, H, K, V, dtype="float32")}


def report(capability: int, calls: list[str]) -> Iterator[dict[str, Any]]:
    """One entry for each kernel of these calls, forward and backward, and of a decode step."""
    from ejkernel.kernels._linear import LinearConfig
    from ejkernel.kernels._triton.recurrent import recurrent

    def gradient(arrays: Any, **cfg: Any) -> Any:
        loss = lambda a: sum(x.astype(jnp.float32).sum() for x in recurrent(**a, cfg=LinearConfig(**cfg)))
        return jax.grad(loss)(arrays)

    for name in calls:
        for kernel, used in kernels_of(gradient, (arguments(*CALLS[name]),), capability):
            yield {"call": name, "kernel": kernel, **used}
    step = lambda arrays: recurrent(**arrays, cfg=LinearConfig(schedule="recurrent"))
    for kernel, used in kernels_of(step, (arguments(("g", "gk", "gv", "g_gamma"), 128, 128, "bfloat16"),), capability):
        yield {"call": "decode", "kernel": kernel, **used}


if __name__ == "__main__":
    assert os.environ.get("TRITON_INTERPRET", "0") != "1", "interpreted kernels cannot be compiled"
    for entry in report(int(sys.argv[1]), sys.argv[2:] or list(CALLS)):
        print(json.dumps(entry), flush=True)
