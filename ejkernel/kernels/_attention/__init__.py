"""Softmax attention as every platform sees it: the problem, its configuration, the operation."""

from ejkernel.kernels._attention.config import AttentionConfig
from ejkernel.kernels._attention.problem import AttentionProblem

__all__ = ["AttentionConfig", "AttentionProblem"]
