"""Softmax attention by cuDNN's fused kernel, through `jax.nn.dot_product_attention`."""

from __future__ import annotations

import dataclasses

import jax
from jaxtyping import Array, Float

from ejkernel.kernels._attention import AttentionConfig, AttentionImplementation, AttentionProblem
from ejkernel.kernels._attention.direct import direct_weights
from ejkernel.kernels._cuda.attention._cudnn import cudnn_output
from ejkernel.kernels._cuda.attention._supports import why_not
from ejkernel.kernels._registry import kernel_registry


@dataclasses.dataclass(frozen=True)
class CudnnAttention(AttentionImplementation):
    """One fused kernel; `supports` says what it covers."""

    def supports(self, problem: AttentionProblem) -> str | None:
        return why_not(problem)

    def refuses(self, problem: AttentionProblem, cfg: AttentionConfig) -> str | None:
        return None if cfg.schedule == "fused" else f"cuda has only schedule 'fused', not {cfg.schedule!r}"

    def heuristic(self, problem: AttentionProblem) -> AttentionConfig:
        return AttentionConfig("fused", platform="cuda", backend="gpu")

    def solve(
        self, problem: AttentionProblem, cfg: AttentionConfig
    ) -> tuple[Float[Array, "B T H V"], Float[Array, "B H T S"] | None]:
        output = _output(dataclasses.replace(problem, return_weights=False))
        return output, _weights(problem) if problem.return_weights else None


_output = jax.jit(cudnn_output)
_weights = jax.jit(direct_weights)
attention = kernel_registry.register("attention", "cuda", "gpu", priority=10)(CudnnAttention())
