"""What the GPU benchmarks share: kernel times by CUPTI, results of any library by name, and a file that grows by the row."""

from __future__ import annotations

import collections
import contextlib
import functools
import json
from collections.abc import Callable
from pathlib import Path
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


def beside_untimed(make: Callable[[], Calls], repeats: int = 20) -> dict[str, Any]:
    """A forward call with the kernels in use and with those that no GPU has timed, in one run.

    Args:
        make: the calls, made anew for each of the two, so that each is traced with its own kernels.

    Returns:
        Of either, milliseconds of the whole call and of the kernels that the other does not launch, by name; and how far apart
        the results are.
    """
    from ejkernel.kernels._triton.linear._plan import untimed_kernels

    forms, results = {}, {}
    for form, context in (("in use", contextlib.nullcontext()), ("untimed", untimed_kernels())):
        with context:
            forward, _, wait = make()
            results[form] = forward()
            wait(results[form])
        forms[form] = functools.partial(kernels_ms, forward, wait, repeats)
    first, last = forms
    times: dict[str, list[dict[str, float]]] = {form: [] for form in forms}
    for form in (first, last, last, first):  # a device that grows warmer is as slow for the one as for the other
        times[form].append(forms[form]())
    found: dict[str, Any] = {}
    for form, other in ((first, last), (last, first)):
        of_kernel = {name: sum(x[name] for x in times[form]) / 2 for name in times[form][0]}
        found[form] = sum(of_kernel.values())
        found[f"{form} alone"] = {name: ms for name, ms in of_kernel.items() if name not in times[other][0]}
    found["apart"] = float(difference(results[last], results[first]))
    return found


class Lines:
    """A file of JSON objects, one a line, written as they come: what is measured is kept if a later row fails."""

    def __init__(self, path: str | None):
        self._path = None if path is None else Path(path)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text("")

    def add(self, **fields: Any) -> None:
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({**fields, "device": default_device().device_kind}) + "\n")


def read_lines(path: str) -> list[dict[str, Any]]:
    """What `Lines` wrote."""
    return [json.loads(line) for line in Path(path).read_text().splitlines()]
