"""Softmax attention as every platform offers it: `(output, weights)`, the weights None with `return_weights=False`."""

from __future__ import annotations

from ejkernel.kernels._attention.config import AttentionConfig
from ejkernel.kernels._attention.problem import AttentionProblem
from ejkernel.kernels._implementation import Signature

ATTENTION = Signature("attention", AttentionProblem.from_arguments, AttentionConfig)
