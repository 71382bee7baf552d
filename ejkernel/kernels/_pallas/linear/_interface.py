"""The linear operations on pallas: TPUs from v4."""

from __future__ import annotations

from ejkernel.kernels._linear.operations import register
from ejkernel.kernels._pallas.linear._platform import PallasLinear
from ejkernel.kernels._registry import Backend, Platform

recurrent, recurrent_gla, lightning_attn = register(PallasLinear(), Platform.PALLAS, Backend.TPU, priority=10)
