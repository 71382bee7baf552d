"""What the GPU benchmarks share: kernel times by CUPTI, and results of any library by name."""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel._device import backend_of, default_device
from ejkernel.testing.timing import best_time

Arrays = dict[str, jax.Array]
Calls = tuple[Callable[[], Any], Callable[[], Any], Callable[[Any], None]]  # forward, forward + backward, wait
BANDWIDTH = 4.3e12  # bytes a second, a device-to-device copy on an H200


def jitted(run: Callable[[Arrays], jax.Array], arrays: Arrays, do: jax.Array) -> Calls:
    """The calls of a function of arrays by name; do: the adjoint of its output."""
    forward = jax.jit(run)

    @jax.jit
    def both(arrays: Arrays, do: jax.Array) -> Any:
        out, pull = jax.vjp(run, arrays)
        return out, pull(do)[0]

    return lambda: forward(arrays), lambda: both(arrays, do), jax.block_until_ready


def named(result: Any) -> dict[str, jax.Array]:
    """output and gradients of a forward+backward result, torch's or JAX's."""
    output, gradients = result
    arrays = {"output": output, **gradients}
    return {n: x if isinstance(x, jax.Array) else jax.dlpack.from_dlpack(x.detach().contiguous()) for n, x in arrays.items()}


@jax.jit
def difference(a: jax.Array, b: jax.Array) -> jax.Array:
    """Relative RMS difference of two arrays, in float32 where they are."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.linalg.norm(a - b) / jnp.linalg.norm(b)


def kernel_ms(call: Callable[[], Any], wait: Callable[[Any], None], repeats: int = 20) -> float:
    """Milliseconds of kernels per call, by CUPTI; on a CPU, to try a script there, milliseconds of a call."""
    if backend_of(default_device()) == "cpu":
        wait(call())
        return best_time(call, wait, seconds=0.02) * 1e3
    return sum(kernels_ms(call, wait, repeats).values())


def kernels_ms(call: Callable[[], Any], wait: Callable[[Any], None], repeats: int = 20) -> dict[str, float]:
    """Milliseconds per call of each kernel by its name, the longest first, by CUPTI."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    for _ in range(3):
        wait(call())
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(repeats):
            result = call()
        wait(result)
        torch.cuda.synchronize()
    found: collections.Counter[str] = collections.Counter()
    for e in profiler.events():
        if e.device_type == torch.autograd.DeviceType.CUDA:
            found[e.name] += e.time_range.elapsed_us() / repeats / 1e3
    return dict(found.most_common())


def print_kernels(call: Callable[[], Any], wait: Callable[[Any], None]) -> None:
    """The dozen kernels of a call that take the longest, in milliseconds."""
    for label, ms in list(kernels_ms(call, wait).items())[:12]:
        print(f"    {label[:48]:48} {ms:.4f}", flush=True)
