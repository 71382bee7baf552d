"""Softmax attention in plain JAX: direct for small calls, blockwise for the rest."""

from ejkernel.kernels._xla.attention._interface import attention

__all__ = ["attention"]
