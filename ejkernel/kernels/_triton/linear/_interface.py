"""The linear operations on triton: NVIDIA GPUs from compute capability 8.0."""

from __future__ import annotations

from ejkernel.kernels._linear.operations import register
from ejkernel.kernels._registry import Backend, Platform
from ejkernel.kernels._triton.linear._platform import TritonLinear

recurrent, recurrent_gla, lightning_attn = register(TritonLinear(), Platform.TRITON, Backend.GPU, priority=10)
