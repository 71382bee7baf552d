"""The cuda platform: libraries and kernels for NVIDIA GPUs."""

from ejkernel.kernels._cuda.attention import attention

__all__ = ["attention"]
