"""What the kernels need to know of a TPU, by generation, and the switch that interprets them where there is none."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

from ejkernel._device import Device, interpreting

MIB = 2**20
LANES = 128  # of a vector register, in every generation


@dataclasses.dataclass(frozen=True)
class Chip:
    """One generation of TPUs; numbers are of one core.

    Attributes:
        name: as people write it.
        kinds: what `jax.Device.device_kind` says.
        topology: the smallest one that libtpu compiles for without a chip.
        vmem: bytes of vector memory.
        clock: cycles a second.
        bandwidth: bytes of HBM a second.
        mxu: rows and columns of a matrix unit.
        clock_is_assumed: whether the clock is not published.
    """

    name: str
    kinds: tuple[str, ...]
    topology: str
    vmem: int
    clock: float
    bandwidth: float
    mxu: int
    clock_is_assumed: bool = False

    @property
    def device(self) -> Device:
        return Device("tpu", self.kinds[0])

    @property
    def vmem_limit(self) -> int:
        """Bytes that one kernel may use: the rest is left to the compiler's own."""
        return self.vmem * 3 // 4


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v4", ("TPU v4",), "v4:2x2x1", 16 * MIB, 1.05e9, 614e9, 128),
        Chip("v5e", ("TPU v5 lite", "TPU v5e"), "v5e:2x2", 128 * MIB, 1.5e9, 819e9, 128),
        Chip("v5p", ("TPU v5", "TPU v5p"), "v5p:2x2x1", 64 * MIB, 1.75e9, 1382e9, 128),
        Chip("v6e", ("TPU v6 lite", "TPU v6e"), "v6e:2x2", 128 * MIB, 1.75e9, 1640e9, 256, clock_is_assumed=True),
        Chip("tpu7x", ("TPU7x", "TPU v7x"), "tpu7x:2x2x1", 64 * MIB, 1.9e9, 3690e9, 256, clock_is_assumed=True),
    )
}


def chip_of(device: Device) -> Chip | None:
    """The generation of a device; None where the kernels were never compiled for it."""
    return next((chip for chip in CHIPS.values() if device.kind in chip.kinds), None)


def interpreted(chip: str = "v5e", how: Any = True) -> contextlib.AbstractContextManager[None]:
    """Inside, calls are planned for a chip and their kernels interpreted on whatever device there is: for tests.

    Args:
        chip: a name of `CHIPS`.
        how: what `pallas_call` is told: True, or a `pltpu.InterpretParams`, which simulates the chip's memories (and is much
            slower).
    """
    return interpreting(CHIPS[chip].device, how)


def not_a_tpu(device: Device) -> str | None:
    """Why kernels for TPUs cannot run on a device; None when they can."""
    if device.backend != "tpu":
        return f"these kernels are for TPUs, and this call computes on {device}: use platform='xla' or 'auto'"
    if chip_of(device) is None:
        known = ", ".join(CHIPS)
        return f"these kernels were compiled for TPU {known}, and this is a {device}: use platform='xla' or 'auto'"
    return None
