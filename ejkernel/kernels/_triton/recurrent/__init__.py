"""The recurrence with any gates."""

from ejkernel.kernels._triton.recurrent._interface import recurrent

__all__ = ["recurrent"]
