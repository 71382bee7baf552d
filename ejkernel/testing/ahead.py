"""A process that pretends to have a GPU, for compiling what a program launches on a machine that has none.

Triton's kernels are compiled into its cache and give zeros; everything else runs on the CPU. Where the cache is brought to a
machine with that GPU and the same Triton, the program starts from there.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax.numpy as jnp

GPUS = {90: "NVIDIA H200"}


@dataclasses.dataclass
class Launches:
    """What has been compiled since the last `forget`, and what has failed to."""

    compiled: int = 0
    failed: Exception | None = None

    def forget(self) -> None:
        self.compiled, self.failed = 0, None


def pretend(capability: int = 90) -> Launches:
    """From here on, before anything else of the package is imported; what is launched is compiled alone."""
    os.environ["TRITON_INTERPRET"] = "0"
    import ejkernel._device as devices
    import ejkernel.callib._compiled as compiling

    gpu, seen = devices.Device("gpu", GPUS[capability], capability), Launches()
    devices.describe = lambda device: gpu  # type: ignore[assignment]
    devices.backend_of = lambda device: gpu.backend
    compiling.capability = lambda: capability  # type: ignore[assignment]

    def compile_only(kernel: Any, names: Any, args: Any, outputs: Any, _: Any, constants: Any, *rest: Any) -> Any:
        (options,) = (x for x in rest if isinstance(x, compiling.Options))
        signature, absent = compiling.signature_of(names, [*args, *outputs])
        try:
            compiling.compile_to_fit(kernel, signature, {**constants, **absent}, options, capability)
        except Exception as error:
            seen.failed = error
            raise
        seen.compiled += 1
        return [jnp.zeros(x.shape, x.dtype) for x in outputs]

    compiling.run_compiled = compile_only  # type: ignore[assignment]
    return seen
