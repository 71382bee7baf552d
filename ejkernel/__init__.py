"""Attention kernels for JAX: one function call, any device, exact gradients.

Start with `ejkernel.modules`; `kernel_registry` knows which implementation runs where.
"""

from ejkernel._version import __version__
from ejkernel.kernels._registry import Backend, Platform, kernel_registry

__all__ = ["Backend", "Platform", "__version__", "kernel_registry"]
