"""Softmax attention by cuDNN's fused kernel, through `jax.nn.dot_product_attention`."""

from __future__ import annotations

import dataclasses

import jax
from jaxtyping import Array, Float

from ejkernel._kept import ATTENTION_OUTPUT, named
from ejkernel.kernels._attention import AttentionConfig, AttentionProblem
from ejkernel.kernels._attention.direct import direct_weights
from ejkernel.kernels._attention.operation import ATTENTION
from ejkernel.kernels._cuda.attention._cudnn import cudnn_output
from ejkernel.kernels._cuda.attention._supports import needs_mask, why_not
from ejkernel.kernels._implementation import Implementation
from ejkernel.kernels._registry import Backend, Platform, kernel_registry


class CudnnAttention(Implementation[AttentionProblem, AttentionConfig]):
    """One fused kernel; `supports` says what it covers."""

    def supports(self, problem: AttentionProblem) -> str | None:
        return why_not(problem)

    def preferred(self, problem: AttentionProblem) -> bool:
        """Not for a single query, nor for masks and biases, which cuDNN reads as numbers for every score.

        On an H200 one query over 2048 keys takes 0.076 ms by cuDNN and 0.056 by xla. Forward and backward at (8, 2048, 16, 128)
        take 2.35 with a mask and 2.79 with a bias, and 1.59 and 2.41 by Triton (benchmarks/RESULTS.md).
        """
        return problem.q_len > 1 and problem.bias is None and not needs_mask(problem)

    def refuses(self, problem: AttentionProblem, cfg: AttentionConfig) -> str | None:
        return None if cfg.schedule == "fused" else f"cuda has only schedule 'fused', not {cfg.schedule!r}"

    def heuristic(self, problem: AttentionProblem) -> AttentionConfig:
        return AttentionConfig("fused", platform="cuda", backend="gpu")

    def route(self, problem: AttentionProblem, cfg: AttentionConfig) -> str:
        return "cuDNN" if problem.packing is None else "cuDNN, a row for each segment"

    def solve(
        self, problem: AttentionProblem, cfg: AttentionConfig
    ) -> tuple[Float[Array, "B T H V"], Float[Array, "B H T S"] | None]:
        output = _output(dataclasses.replace(problem, return_weights=False))
        return output, _weights(problem) if problem.return_weights else None


_output = jax.jit(lambda problem: named(ATTENTION_OUTPUT, cudnn_output(problem)))
_weights = jax.jit(direct_weights)
attention = ATTENTION.register(CudnnAttention(), kernel_registry, Platform.CUDA, Backend.GPU, priority=10)
