"""The same calls by flash-linear-attention, where it is installed: what the triton platform is measured against.

Nothing here runs without torch, flash-linear-attention and an NVIDIA GPU; importing this module needs none of them.
"""

from __future__ import annotations

import concurrent.futures
import functools
import gc
import importlib
import importlib.util
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel._device import default_device, describe
from ejkernel.testing.contenders import Arrays, Contender

_KERNELS = [set(), {"g"}, {"g_gamma"}, {"gk"}, {"gv"}, {"gk", "gv"}]
_CONSTANT = "g_gamma"  # a constant of the layer there, without a gradient


def missing() -> str | None:
    """Why flash-linear-attention cannot run here; None when it can."""
    absent = [name for name in ("torch", "fla") if importlib.util.find_spec(name) is None]
    if absent:
        return f"{' and '.join(absent)} not installed (pip install flash-linear-attention)"
    if describe(default_device()).capability is None:
        return "it needs an NVIDIA GPU"
    return None


class FlashLinear:
    """One call on torch copies of JAX arrays: `forward()`, `both()`, and `wait(result)` for either.

    The kernel follows from the gates: simple GLA for `g [B, T, H]`, `g_gamma` or none, GLA for a gate per key channel (`gk`,
    or `g` of rank 4), and the step-by-step GLA where `gv` is given too.
    """

    def __init__(
        self,
        arrays: Mapping[str, jax.Array],
        cotangent: jax.Array,
        cu_seqlens: np.ndarray | None = None,
        *,
        skip_guard: bool = False,
    ):
        """
        Args:
            arrays: query, key, value and gates by the names of `recurrent_attention`.
            cotangent: the gradient of the output.
            skip_guard: run its scalar-gate backward also where it refuses (Hopper with Triton 3.4 to 3.7.0): as a mark of
                speed only, since the result may be wrong there.
        """
        named = dict(arrays)
        if "g" in named and named["g"].ndim == 4:
            named["gk"] = named.pop("g")
        gates = named.keys() - {"query", "key", "value"}
        if gates not in _KERNELS:
            raise ValueError(f"flash-linear-attention has no kernel for these gates together: {', '.join(sorted(gates))}.")
        if named["key"].shape[2] != named["query"].shape[2]:
            raise ValueError("flash-linear-attention's kernels take as many key heads as query heads.")
        self._prepare(named, cotangent, cu_seqlens, skip_guard)

    def _prepare(
        self, arrays: Mapping[str, jax.Array], cotangent: jax.Array, cu_seqlens: np.ndarray | None, skip_guard: bool
    ) -> None:
        import torch

        if skip_guard:
            import fla.ops.common.chunk_o as chunk_o

            chunk_o.IS_NVIDIA_HOPPER = False
        self.tensors = {name: torch.from_dlpack(x).clone() for name, x in arrays.items()}
        self.leaves = {n: t.requires_grad_() for n, t in self.tensors.items() if n != _CONSTANT}
        self.cotangent = torch.from_dlpack(cotangent).clone()
        self.packed = {} if cu_seqlens is None else {"cu_seqlens": torch.tensor(cu_seqlens, device="cuda", dtype=torch.long)}

    def _run(self) -> Any:
        from fla.ops.gla import chunk_gla, fused_recurrent_gla
        from fla.ops.simple_gla import chunk_simple_gla

        q, k, v = (self.tensors[name] for name in ("query", "key", "value"))
        gates = {n: t for n, t in self.tensors.items() if n not in ("query", "key", "value")}
        if "gv" in gates:
            return fused_recurrent_gla(q, k, v, **gates, **self.packed)[0]
        if "gk" in gates:
            return chunk_gla(q, k, v, gates["gk"], **self.packed)[0]
        return chunk_simple_gla(q, k, v, **gates, **self.packed)[0]

    def forward(self) -> Any:
        """The output."""
        import torch

        with torch.no_grad():
            return self._run()

    def both(self) -> tuple[Any, dict[str, Any]]:
        """The output and the gradient of every array but `g_gamma`."""
        import torch

        output = self._run()
        gradients = torch.autograd.grad(output, list(self.leaves.values()), self.cotangent)
        return output.detach(), dict(zip(self.leaves, gradients, strict=True))

    @staticmethod
    def wait(result: Any) -> None:
        """Returns when everything that was started is done."""
        import torch

        torch.cuda.synchronize()


def contender(make: type[FlashLinear], completed: Callable[[Arrays], Arrays]) -> Contender:
    """flash-linear-attention on torch copies of the arrays; completed: with the gates that an operation adds by itself."""

    def prepare(direction: str, arrays: Arrays) -> Callable[[jax.Array], Any]:
        tune_on_all_cores()
        forget_tuning()
        value = arrays["value"]
        shape = (*value.shape[:2], max(arrays["query"].shape[2], value.shape[2]), value.shape[3])
        named = completed(arrays)
        made: dict[int, FlashLinear] = {}

        def run(cotangent: jax.Array) -> Any:
            if id(cotangent) not in made:  # torch copies its arguments once, not in every call that is timed
                made.clear()
                made[id(cotangent)] = make(named, jnp.broadcast_to(cotangent, shape))
            call = made[id(cotangent)]
            return call.forward() if direction == "forward" else call.both()

        return run

    return Contender(prepare, FlashLinear.wait, missing(), library="flash-linear-attention")


def forget_tuning() -> None:
    """Clears what every Triton autotuner in the process has learnt, and keeps it from reading what it wrote to disk.

    Flash-linear-attention's autotuners store their choice by channels and heads, not by length or batch: without this a shape
    runs with the tiles that were best for another one.
    """
    for kind in ("gla", "simple_gla", "delta_rule", "gated_delta_rule", "kda"):  # what is not imported yet cannot be told
        importlib.import_module(f"fla.ops.{kind}")
    from triton.runtime.autotuner import Autotuner

    for thing in gc.get_objects():
        if isinstance(thing, Autotuner):
            thing.cache.clear()
            thing.cache_results = False


@functools.cache  # once in a process
def tune_on_all_cores() -> None:
    """Lets Triton's autotuners, which flash-linear-attention uses, compile candidates in parallel and time each for 10 ms."""
    from triton.backends.nvidia.driver import CudaDriver
    from triton.runtime import _async_compile
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench

    run = Autotuner.run
    executor = concurrent.futures.ThreadPoolExecutor(os.cpu_count())

    def compiled_first(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not self.cache and len(self.configs) > 1:
            with _async_compile.AsyncCompileMode(executor, ignore_errors=True):
                self.warmup(*args, **{name: x for name, x in kwargs.items() if name != "warmup"})
        return run(self, *args, **kwargs)

    Autotuner.run = compiled_first
    CudaDriver.get_benchmarker = lambda self: lambda call, quantiles: do_bench(call, warmup=2, rep=10, quantiles=quantiles)
