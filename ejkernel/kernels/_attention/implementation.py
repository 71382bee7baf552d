"""What a platform's implementation of softmax attention is, and how users call it without an executor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ejkernel.kernels._attention.config import AttentionConfig
from ejkernel.kernels._attention.problem import AttentionProblem
from ejkernel.types.mask import MaskInfo


class AttentionImplementation:
    """One platform's softmax attention. Subclasses say what they support, how to choose, and how to solve."""

    def supports(self, problem: AttentionProblem) -> str | None:
        """The reason why this call cannot run here; None when it can."""
        raise NotImplementedError(f"{type(self).__name__} must define supports.")

    def heuristic(self, problem: AttentionProblem) -> AttentionConfig:
        """The configuration to take when nothing was measured."""
        raise NotImplementedError(f"{type(self).__name__} must define heuristic.")

    def candidates(self, problem: AttentionProblem) -> list[AttentionConfig]:
        """The configurations worth measuring."""
        return [self.heuristic(problem)]

    def refuses(self, problem: AttentionProblem, cfg: AttentionConfig) -> str | None:
        """The reason why this call cannot run with `cfg` here; None when it can."""
        raise NotImplementedError(f"{type(self).__name__} must define refuses.")

    def solve(
        self, problem: AttentionProblem, cfg: AttentionConfig
    ) -> tuple[Float[Array, "B T H V"], Float[Array, "B H T S"] | None]:
        """`(output, weights)`; the weights are None unless `problem.return_weights`."""
        raise NotImplementedError(f"{type(self).__name__} must define solve.")

    def __call__(
        self,
        query: Float[Array, "B T H D"],
        key: Float[Array, "B S Hkv D"],
        value: Float[Array, "B S Hkv V"],
        bias: Float[Array, " ..."] | None = None,
        dropout_rng: Array | None = None,
        softmax_aux: Float[Array, " ..."] | None = None,
        *,
        mask_info: MaskInfo | None = None,
        attention_mask: Bool[Array, " ..."] | None = None,
        init_bias: Callable[[], Array] | None = None,
        deterministic: bool = True,
        softmax_scale: float | Float[Array, ""] | None = None,
        logits_soft_cap: float | None = None,
        dtype: Any = jnp.bfloat16,
        softmax_dtype: Any = None,
        dropout_prob: float = 0.0,
        causal: bool = False,
        sliding_window: int | tuple[int, int] | None = None,
        cfg: AttentionConfig | None = None,
    ) -> tuple[Float[Array, "B T H V"], Float[Array, "B H T S"]]:
        """`(output, weights)` on this platform; the arguments are those of `ejkernel.modules.attention`."""
        problem = AttentionProblem.from_arguments(
            query,
            key,
            value,
            bias,
            dropout_rng,
            softmax_aux,
            mask_info=mask_info,
            attention_mask=attention_mask,
            init_bias=init_bias,
            deterministic=deterministic,
            softmax_scale=softmax_scale,
            logits_soft_cap=logits_soft_cap,
            dtype=dtype,
            softmax_dtype=softmax_dtype,
            dropout_prob=dropout_prob,
            causal=causal,
            sliding_window=sliding_window,
        )
        cfg = self.heuristic(problem) if cfg is None else cfg
        reason = self.supports(problem) or self.refuses(problem, cfg)
        if reason is not None:
            raise ValueError(f"attention cannot run here: {reason}.")
        output, weights = self.solve(problem, cfg)
        assert weights is not None  # from_arguments asks for them
        return output, weights
