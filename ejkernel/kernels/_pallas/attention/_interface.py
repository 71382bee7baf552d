"""`attention` on pallas: TPUs, by JAX's splash attention kernel."""

from __future__ import annotations

from ejkernel.kernels._attention.operation import ATTENTION
from ejkernel.kernels._pallas.attention._platform import PallasAttention
from ejkernel.kernels._registry import Backend, Platform, kernel_registry

attention = ATTENTION.register(PallasAttention(), kernel_registry, Platform.PALLAS, Backend.TPU, priority=10)
