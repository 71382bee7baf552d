"""Which programs on several TPUs the kernels can be part of.

To XLA's partitioner a kernel is opaque, and on TPUs JAX has no way to tell it how a call splits: `custom_partitioning` is not
wired through to libtpu. So a program must say itself how its arrays are split: by `jax.shard_map`, or by a mesh with explicit
axes.
"""

from __future__ import annotations

import jax
from jax.sharding import AxisType

from ejkernel._device import Device, interpretation

ADVICE = (
    "call it inside jax.shard_map, or set a mesh with explicit axes (jax.sharding.AxisType.Explicit); "
    "platform='xla' splits by itself"
)


def split_by_the_compiler(device: Device) -> str | None:
    """Why a call cannot be part of the program around it: XLA may split its arrays. None where that is known not to be so."""
    if interpretation() is not False:
        return None
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        if AxisType.Auto not in mesh.axis_types:
            return None
        axes = [name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind is AxisType.Auto]
        return f"XLA may split its arrays over the mesh axes {', '.join(axes)}, and TPU kernels do not tell it how: {ADVICE}"
    if not device.split:
        return None
    over = f"this program's {jax.device_count()} devices"
    return f"XLA splits its arrays over {over}, or may do so under jit, and TPU kernels do not tell it how: {ADVICE}"
