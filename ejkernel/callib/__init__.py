"""Calling kernels written in another language from JAX: `triton_call`, and `cdiv` for its grids.

Importing this needs neither Triton nor a GPU; calling does, and says what is missing.
"""

from ejkernel.callib._triton import compile_for, is_interpreted, shared_memory_limit, triton_call

__all__ = ["cdiv", "compile_for", "is_interpreted", "shared_memory_limit", "triton_call"]


def cdiv(x: int, y: int) -> int:
    """x / y rounded up: how many blocks of y cover x.

    Example:
        >>> cdiv(65, 64)
        2
    """
    return -(-x // y)
