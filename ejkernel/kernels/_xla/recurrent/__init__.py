"""Gated linear attention in plain JAX."""

from ejkernel.kernels._xla.recurrent._interface import recurrent

__all__ = ["recurrent"]
