"""`attention` on triton: NVIDIA GPUs from compute capability 8.0."""

from __future__ import annotations

from ejkernel.kernels._attention.operation import ATTENTION
from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._triton.attention._platform import TritonAttention

# After cuda, which takes the calls that cuDNN knows; before xla.
attention = ATTENTION.register(TritonAttention(), kernel_registry, Platform.TRITON, Backend.GPU, priority=5)
