"""The recurrence with any gates, on Triton. `routes` says which kernels a call takes."""

from ejkernel.kernels._triton.linear._platform import TritonLinear

__all__ = ["TritonLinear"]
