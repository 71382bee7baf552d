"""Calling kernels written in another language from JAX: `triton_call`, and `cdiv` for its grids.

Importing this needs neither Triton nor a GPU; calling does, and says what is missing.
"""

from ejkernel.callib._compiled import shared_memory_of
from ejkernel.callib._parts import HostCallbacks
from ejkernel.callib._triton import Launch, compile_for, instead_of_launching, is_interpreted, triton_call

__all__ = [
    "HostCallbacks", "Launch", "cdiv", "compile_for", "instead_of_launching", "is_interpreted", "shared_memory_of",
    "triton_call",
]  # fmt: skip


def cdiv(x: int, y: int) -> int:
    """x / y rounded up: how many blocks of y cover x.

    Example:
        >>> cdiv(65, 64)
        2
    """
    return -(-x // y)
