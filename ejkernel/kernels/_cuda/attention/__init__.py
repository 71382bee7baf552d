"""Softmax attention by cuDNN."""

from ejkernel.kernels._cuda.attention._interface import attention

__all__ = ["attention"]
