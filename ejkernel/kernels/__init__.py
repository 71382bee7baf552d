"""Implementations: the registry, the shared problem definitions and one package per platform.

What an operation or a platform of one's own needs is here by name: the `Signature` of an operation, the `Implementation` of its
family on a platform, and the `PlatformFunction` that both make in a `KernelRegistry`.
"""

from ejkernel.kernels._implementation import Implementation, PlatformFunction, Signature
from ejkernel.kernels._registry import Backend, KernelRegistry, Platform, kernel_registry

__all__ = ["Backend", "Implementation", "KernelRegistry", "Platform", "PlatformFunction", "Signature", "kernel_registry"]
