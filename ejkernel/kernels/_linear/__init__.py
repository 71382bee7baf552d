"""What every platform of the linear operations shares: the problem, its argument checks, the configs, the platform shell."""

from ejkernel.kernels._linear.config import LinearConfig
from ejkernel.kernels._linear.platform_function import LinearFunction
from ejkernel.kernels._linear.problem import LinearProblem

__all__ = ["LinearConfig", "LinearFunction", "LinearProblem"]
