"""What every platform of the linear operations shares: the problem, its argument checks, its configuration, the operations."""

from ejkernel.kernels._linear.config import LinearConfig
from ejkernel.kernels._linear.problem import LinearProblem

__all__ = ["LinearConfig", "LinearProblem"]
