"""Gluon kernels interpreted on host memory: Triton's own interpreter does not know them.

It computes their values with numpy, and it finds what tests on a GPU find by luck: partitions that touch the same shared
memory without a barrier between them, results that are used before they were waited for, operands overwritten under way,
stores that products do not see, copies that outlive their program, accesses out of bounds, partitions that all wait.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from ejkernel.callib._gluon._functions import interpreted
from ejkernel.callib._gluon._partitions import run_program
from ejkernel.callib._gluon._values import Buffer, Pointer, as_tensor


def launch(
    kernel: Any, grid: tuple[int, int, int], arguments: Mapping[str, Any], constants: Mapping[str, Any], warps: int
) -> None:
    """Runs every program of a launch, one after another. Arrays among the arguments are written in place."""
    pointers = {name: _argument(name, value) for name, value in arguments.items()}
    function = interpreted(kernel.fn)
    given = {**pointers, **constants}
    values = [given[name] for name in inspect.signature(kernel.fn).parameters]
    for z, y, x in itertools.product(*(range(n) for n in reversed(grid))):
        try:
            run_program(lambda: function(*values), ((x, y, z), grid), warps)
        except Exception as error:
            error.add_note(f"In program {(x, y, z)} of {kernel.fn.__name__}, interpreted.")
            raise


def _argument(name: str, value: Any) -> Any:
    if value is None:
        return None
    return Pointer(Buffer(name, value), 0) if isinstance(value, np.ndarray) else as_tensor(value)
