"""The device that a call computes on: found once, from its arrays, and handed down from there.

A call on concrete arrays computes where they lie. Under `jit` arrays have no place yet: then it is the kind of device that the
mesh around the call is made of, else JAX's default device. Nothing else in the library asks.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterable, Iterator
from typing import Any

import jax

_settings: Any = jax.config  # whose attributes come from flags, which type checkers do not see


@dataclasses.dataclass(frozen=True)
class Device:
    """What a choice of kernels may depend on.

    Attributes:
        backend: `"cpu"`, `"gpu"` or `"tpu"`; other platforms of JAX keep their own name.
        kind: the model, such as `"NVIDIA H200"` or `"TPU v5 lite"`.
        capability: an NVIDIA GPU's compute capability, 90 for 9.0; None for anything else.
        split: of a TPU, whether XLA may split the call's arrays between devices, which its kernels cannot be part of; None for
            anything else, and before a call.
    """

    backend: str
    kind: str
    capability: int | None = None
    split: bool | None = None

    def __str__(self) -> str:
        return self.kind if self.backend in self.kind.lower() else f"{self.kind} ({self.backend})"


def backend_of(device: jax.Device) -> str:
    """`"gpu"`, `"tpu"` or `"cpu"` for a device; other platforms keep their own name."""
    return {"cuda": "gpu", "rocm": "gpu"}.get(device.platform, device.platform)


@functools.cache
def describe(device: jax.Device) -> Device:
    """What of a JAX device the choice of kernels may depend on."""
    capability = None
    if backend_of(device) == "gpu" and "cuda" in device.client.platform_version.lower():
        major, _, minor = str(device.compute_capability).partition(".")
        capability = 10 * int(major) + int(minor or 0)
    return Device(backend_of(device), device.device_kind, capability)


def default_device() -> jax.Device:
    """The device that computations of this thread run on when no argument says otherwise."""
    chosen = _settings.jax_default_device
    if chosen is None:
        return jax.local_devices()[0]
    return jax.local_devices(backend=chosen)[0] if isinstance(chosen, str) else chosen


def jax_device_of(arrays: Iterable[Any]) -> jax.Device:
    """The first device of this process that holds one of the arrays; without values the mesh's kind, or the default device."""
    for array in arrays:
        value = underneath(array)
        if isinstance(value, jax.Array):
            here: list[Any] = list(value.sharding.addressable_devices)
            if here:
                return min(here, key=lambda device: device.id)
    of_mesh, usual = mesh_platform(), default_device()
    if of_mesh in (None, usual.platform, backend_of(usual)):
        return usual
    try:
        return jax.local_devices(backend=of_mesh)[0]
    except RuntimeError:  # a mesh of devices that this process does not have, to compile ahead for them
        return usual


def mesh_platform() -> str | None:
    """The kind of device that the mesh around this point is made of; None where there is no mesh."""
    of_mesh = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return None if of_mesh is None else of_mesh.platform


_forced: contextvars.ContextVar[Device | None] = contextvars.ContextVar("ejkernel_device", default=None)


@contextlib.contextmanager
def on_device(device: Device) -> Iterator[None]:
    """Inside, calls are planned for this device, whatever this process has: to compile ahead, and for kernels being traced."""
    token = _forced.set(device)
    try:
        yield
    finally:
        _forced.reset(token)


def planned() -> Device | None:
    """The device of the innermost `on_device` around this point, if any."""
    return _forced.get()


_interpreted: contextvars.ContextVar[Any] = contextvars.ContextVar("ejkernel_interpreted", default=False)


@contextlib.contextmanager
def interpreting(device: Device, how: Any) -> Iterator[None]:
    """Inside, calls are planned for `device`, and kernels that can be are interpreted: `how` is for their platform to read."""
    token = _interpreted.set(how)
    try:
        with on_device(device):
            yield
    finally:
        _interpreted.reset(token)


def interpretation() -> Any:
    """What the innermost `interpreting` around this point was told; False where there is none."""
    return _interpreted.get()


def device_of(arrays: Iterable[Any]) -> Device:
    """The device that a call on these arrays computes on."""
    arrays = list(arrays)
    return placed(planned() or describe(jax_device_of(arrays)), may_be_split(arrays))


def placed(device: Device, split: bool) -> Device:
    """A TPU with its `split`, unless that is known already; any other device as it is.

    It is asked once for a call: while the call is traced, its arrays look as if nobody knew where they lie.
    """
    if device.backend != "tpu" or device.split is not None:
        return device
    return dataclasses.replace(device, split=split and jax.device_count() > 1)


def may_be_split(arrays: Iterable[Any]) -> bool:
    """Whether one of the arrays lies on several devices, or may do so: one without a value yet."""
    values = [underneath(array) for array in arrays]
    unknown = any(value is None or isinstance(value, jax.ShapeDtypeStruct) for value in values)
    return unknown or any(isinstance(value, jax.Array) and len(value.sharding.device_set) > 1 for value in values)


def inner(tracer: Any) -> Any:
    """What a tracer of `jax.vmap`, `jax.jvp` or `jax.grad` wraps; None for any other tracer."""
    if hasattr(tracer, "batch_dim"):
        return tracer.val
    return getattr(tracer, "primal", None)


def underneath(array: Any) -> Any:
    """The array that tracers wrap, or the array itself; None where there is no value yet."""
    while isinstance(array, jax.core.Tracer):
        array = inner(array)
    return array
