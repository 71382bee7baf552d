"""Every kernel of the triton platform once, at sizes that end in the middle of a tile: what `make sanitize-gpu` has watched by
compute-sanitizer.

    python -m tests.triton.sanitized FILE        compiles the programs and writes them, unless they are there
    python -m tests.triton.sanitized FILE 90     the same for such a GPU, on a machine that need not have one
    python -m tests.triton.watched FILE          runs them

Triton itself does not start under compute-sanitizer, so the process that is watched does without it. Arrays come from the host
and only the kernels run on the GPU, so that little else is watched. Exits with an error when a kernel was left out.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import itertools
import pickle
import pkgutil
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from ejkernel.callib import compile_for, shared_memory_of
from ejkernel.kernels import _triton
from ejkernel.kernels._delta import GatedDeltaRuleConfig
from ejkernel.kernels._linear import LinearConfig
from ejkernel.kernels._triton import attention, gated_delta_rule, recurrent
from ejkernel.kernels._triton.causal_conv1d._solve import activated
from ejkernel.kernels._triton.linear.kernels.rows_scan import scan_rows_wide
from ejkernel.kernels._triton.linear.routes.scans import WIDE_SHARED
from ejkernel.testing.attention_cases import AttentionCase
from ejkernel.testing.delta_cases import DeltaCase
from ejkernel.testing.results import code
from tests.triton.linear_cases import Case
from tests.triton.watched import read

PACKED = (0, 5, 5, 70, 130)
RESETS = "resets now and then"  # some chunks are weakly gated, others are not: both ways are watched
_LONG, _SHORT = GatedDeltaRuleConfig("chunked", 64), GatedDeltaRuleConfig("chunked", 32)
BF16: dict[str, Any] = {"dtype": "bfloat16", "gate_dtype": "bfloat16", "block_q": 64, "state": True}
CASES: list[Case | DeltaRun | AttentionRun | ConvolutionRun] = [
    Case((), shape=(1, 70, 2, 1, 40, 24), **BF16),
    Case((), shape=(1, 2100, 1, 1, 24, 40), **BF16),  # splits the sequence
    Case(("g",), shape=(1, 130, 2, 1, 64, 128), cu_seqlens=PACKED, reverse=True, **BF16),  # whole tiles
    Case((), shape=(1, 2100, 1, 1, 128, 64), **BF16),
    Case(("g",), shape=(1, 2100, 1, 1, 64, 64), **BF16),
    Case(("g",), shape=(1, 70, 2, 1, 100, 36), block_q=32, state=True),
    Case(("g",), shape=(1, 70, 1, 1, 300, 70), **BF16),
    Case(("g",), shape=(1, 70, 1, 1, 140, 24), **BF16),
    Case(("gk",), shape=(1, 70, 2, 1, 140, 100), **BF16),
    Case(("g_gamma",), shape=(1, 130, 2, 1, 40, 24), cu_seqlens=PACKED, **BF16),
    Case(("gk",), RESETS, shape=(1, 70, 2, 1, 100, 36), **BF16),
    Case(("gk",), RESETS, shape=(1, 130, 2, 1, 40, 24), cu_seqlens=PACKED, reverse=True, **BF16),
    Case(("gk",), shape=(1, 2100, 1, 1, 24, 40), **BF16),
    Case(("gk",), "resets in some segments", shape=(1, 2100, 1, 1, 128, 128), **BF16),  # whole tiles
    Case(("gk",), shape=(1, 130, 2, 1, 64, 64), cu_seqlens=PACKED, reverse=True, **BF16),
    Case(("gk",), shape=(1, 130, 2, 1, 256, 128), cu_seqlens=PACKED, **BF16),
    Case(("gk", "gv"), RESETS, shape=(1, 130, 2, 1, 128, 128), cu_seqlens=PACKED, **BF16),
    Case(("gk",), shape=(1, 70, 1, 1, 24, 40), block_q=32, state=True),
    Case(("gv",), shape=(1, 70, 1, 1, 24, 40), **BF16),
    Case(("g", "gk", "gv", "g_gamma"), RESETS, shape=(1, 130, 2, 1, 40, 24), cu_seqlens=PACKED, **BF16),
    Case(("g", "gk", "gv", "g_gamma"), shape=(3, 3, 4, 2, 40, 24), schedule="recurrent", **BF16),
    Case(("gk",), shape=(1, 130, 2, 1, 40, 24), cu_seqlens=PACKED, schedule="recurrent", reverse=True, **BF16),
]


@dataclasses.dataclass(frozen=True)
class DeltaRun:
    """A case of the delta rule with the parts of `Case` that are used here."""

    case: DeltaCase
    cfg: GatedDeltaRuleConfig = _LONG

    def __str__(self) -> str:
        return f"delta rule {self.case} {self.cfg.schedule}"

    @property
    def cu_seqlens(self) -> tuple[int, ...] | None:
        lengths = self.case.lengths
        return None if lengths is None else tuple(itertools.accumulate((0, *lengths)))

    def arrays(self) -> dict[str, jax.Array]:
        return self.case.arguments()[0]

    def weights(self) -> tuple[np.ndarray, np.ndarray]:
        return self.case.weights()


_DELTA: dict[str, Any] = {"initial_state": True, "key_channels": 40, "value_channels": 24, "dtype": "bfloat16"}
_TILES_DELTA: dict[str, Any] = {**_DELTA, "time": 300, "key_channels": 64, "value_channels": 128}
_PACKED_TILES: dict[str, Any] = {**_TILES_DELTA, "lengths": (5, 0, 65, 60)}
_PACKED_DELTA: dict[str, Any] = {**_DELTA, "lengths": (5, 0, 65, 60)}
CASES += [
    DeltaRun(DeltaCase("head", batch=1, gate="head", **_DELTA)),
    DeltaRun(DeltaCase("head in segments", batch=1, time=300, gate="head", **_DELTA), GatedDeltaRuleConfig("chunked", 16)),
    DeltaRun(DeltaCase("ungated packed", **_PACKED_DELTA)),
    DeltaRun(DeltaCase("head whole tiles", batch=1, gate="head", **_TILES_DELTA)),
    DeltaRun(DeltaCase("channel whole tiles packed", gate="channel", reverse=True, **_PACKED_TILES)),
    DeltaRun(DeltaCase("channel packed", gate="channel", gate_kind="resets", reverse=True, **_PACKED_DELTA)),
    DeltaRun(DeltaCase("channel float32", batch=1, gate="channel", **{**_DELTA, "dtype": "float32"}), _SHORT),
    DeltaRun(DeltaCase("channel packed", gate="channel", **_PACKED_DELTA), GatedDeltaRuleConfig("recurrent", 64)),
]


@dataclasses.dataclass(frozen=True)
class AttentionRun:
    """A case of softmax attention with the parts of `Case` that are used here."""

    case: AttentionCase
    cu_seqlens: None = None

    def __str__(self) -> str:
        return f"attention {self.case}"

    def arrays(self) -> dict[str, jax.Array]:
        with jax.ensure_compile_time_eval():
            return self.case.arrays

    def weights(self) -> tuple[np.ndarray]:
        with jax.ensure_compile_time_eval():
            return (np.asarray(self.case.d_output),)

    def function(self, cu_seqlens: None, **arrays: jax.Array) -> tuple[jax.Array]:
        with jax.ensure_compile_time_eval():
            options = self.case.options
        return (attention(**arrays, **options, return_weights=False)[0],)


_ATTENTION: dict[str, Any] = {"q_len": 150, "kv_len": 170, "channels": 40, "value_channels": 24, "dtype": "bfloat16"}
CASES += [
    AttentionRun(AttentionCase("bias", bias=(1, "H", "T", "S"), causal=True, sinks=(1,), soft_cap=20.0, **_ATTENTION)),
    AttentionRun(AttentionCase("mask and window", mask=2, window=(30, 9), dropout=0.1, bias=("B", 1, 1, "S"), **_ATTENTION)),
    AttentionRun(AttentionCase("packed", segments="packed", causal=True, **{**_ATTENTION, "kv_len": 150})),
    AttentionRun(AttentionCase("float32", bias=(1, "H", "T", 1), mask="keys", **{**_ATTENTION, "dtype": "float32"})),
    AttentionRun(AttentionCase("decode", segments="decode", **{**_ATTENTION, "q_len": 3, "kv_len": 700})),
]


@dataclasses.dataclass(frozen=True)
class ConvolutionRun:
    """The short convolution's kernels."""

    cu_seqlens: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return "convolution" + " packed" * (self.cu_seqlens is not None)

    def arrays(self) -> dict[str, jax.Array]:
        shapes = {"x": (1, 130, 40), "weight": (4, 40), "bias": (40,)}
        return {name: jax.random.normal(jax.random.key(i), shape) for i, (name, shape) in enumerate(shapes.items())}

    def weights(self) -> tuple[np.ndarray]:
        return (np.ones((1, 130, 40), np.float32),)

    def function(self, cu_seqlens: Any, x: jax.Array, weight: jax.Array, bias: jax.Array) -> tuple[jax.Array]:
        return (activated("silu", {"x": x, "weight": weight, "bias": bias}, cu_seqlens),)


CASES += [
    ConvolutionRun(),
    ConvolutionRun(PACKED),
]


def kernels() -> set[str]:
    """The functions of the platform that are launched: those that ask which program they are, or start warpgroups."""
    found = set()
    for module in pkgutil.walk_packages(_triton.__path__, _triton.__name__ + "."):
        for thing in vars(importlib.import_module(module.name)).values():
            function = getattr(thing, "fn", None)
            source = "" if function is None else inspect.getsource(function)
            asks = any(text in source for text in (" = program_at(", " = tl.program_id(", "gl.warp_specialize("))
            if asks and function.__name__ != "program_at":
                found.add(name_of(thing))
    return found


def name_of(kernel: Any) -> str:
    """Such as `state_scan.state_scan`: kernels of two files may have one name."""
    return f"{kernel.fn.__module__.rpartition('.')[2]}.{kernel.fn.__qualname__}"


def value_and_gradient(case: Case | DeltaRun | AttentionRun | ConvolutionRun) -> Any:
    """Values and gradients of a case's loss."""
    if isinstance(case, AttentionRun | ConvolutionRun):
        function: Any = case.function
    elif isinstance(case, DeltaRun):
        function = functools.partial(gated_delta_rule, reverse=case.case.reverse, cfg=case.cfg)
    else:
        cfg = LinearConfig(schedule=case.schedule, block_q=case.block_q)
        function = functools.partial(recurrent, reverse=case.reverse, cfg=cfg)

    def run(arrays: dict[str, Any], cu_seqlens: Any, weights: Any) -> Any:
        def loss(arrays: dict[str, Any]) -> Any:
            out = function(**arrays, cu_seqlens=cu_seqlens)
            return sum(jnp.sum(x.astype(jnp.float32) * w.astype(jnp.float32)) for x, w in zip(out, weights, strict=True)), out

        return jax.grad(loss, has_aux=True)(arrays)

    return run


def arguments(case: Case | DeltaRun | AttentionRun | ConvolutionRun) -> tuple[Any, Any, Any]:
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        arrays = {name: np.asarray(x) for name, x in jax.jit(case.arrays)().items()}
    cu_seqlens = None if case.cu_seqlens is None else np.asarray(case.cu_seqlens, np.int32)
    return arrays, cu_seqlens, case.weights()


def main() -> None:
    from ejkernel.callib import _compiled

    path, *capability = sys.argv[1:]
    target = int(capability[0]) if capability else _compiled.capability()
    about = {"capability": target, "jax": jax.__version__, "code": code("tests/triton")}
    if Path(path).exists() and read(path)["about"] == about:
        print(f"{path} has the programs of this code")
        return
    with compile_for(target):
        programs = _programs(target)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        pickle.dump({"about": about, "programs": programs}, file)


def _programs(target: int) -> list[tuple[str, bytes, list[np.ndarray]]]:
    """(name, exported program, arguments) of every case, compiled for a compute capability."""
    from ejkernel.callib import _compiled

    begin = time.monotonic()
    seen: set[str] = set()
    original = _compiled.run_compiled

    def noted(kernel: Any, *rest: Any) -> Any:
        seen.add(name_of(kernel))
        return original(kernel, *rest)

    _compiled.run_compiled = noted  # type: ignore[assignment]
    allowed = [jax.export.DisabledSafetyCheck.custom_call("triton_kernel_call_ffi")]
    programs = []
    for case in CASES:
        leaves, tree = jax.tree.flatten(arguments(case))
        run = lambda *leaves, case=case, tree=tree: jax.tree.leaves(value_and_gradient(case)(*jax.tree.unflatten(tree, leaves)))
        program = jax.export.export(jax.jit(run), platforms=["cuda"], disabled_checks=allowed)(*leaves)
        programs.append((str(case), bytes(program.serialize()), [np.asarray(x) for x in leaves]))
        print(f"{case}: {time.monotonic() - begin:.1f} s", flush=True)
    elsewhere = set() if shared_memory_of(target) >= WIDE_SHARED else {name_of(scan_rows_wide)}
    elsewhere |= set() if target == 90 else {name for name in kernels() if name.endswith("_by_warpgroups")}
    if missing := kernels() - seen - elsewhere:
        raise SystemExit(f"no case runs {', '.join(sorted(missing))}")
    print(f"{len(CASES)} cases, {len(seen)} kernels")
    return programs


if __name__ == "__main__":
    main()
