"""Implementations in plain JAX: they run everywhere XLA does.

The functions carry the names of the packages they live in, so they are imported here, in place of the packages.
"""

from ejkernel.kernels._xla.attention._interface import attention

__all__ = ["attention"]
