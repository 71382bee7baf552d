"""Softmax attention as every platform sees it: the problem, its configuration, and what an implementation is."""

from ejkernel.kernels._attention.config import AttentionConfig
from ejkernel.kernels._attention.implementation import AttentionImplementation
from ejkernel.kernels._attention.problem import AttentionProblem

__all__ = ["AttentionConfig", "AttentionImplementation", "AttentionProblem"]
