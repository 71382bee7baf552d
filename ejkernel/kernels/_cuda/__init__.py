"""The cuda platform: NVIDIA's own libraries."""

from ejkernel.kernels._aliases import offer

__all__ = offer(__name__, attention="attention")
