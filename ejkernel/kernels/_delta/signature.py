"""The delta rule as every platform offers it: names, order and defaults of its arguments."""

from __future__ import annotations

from ejkernel.kernels._delta.config import GatedDeltaRuleConfig
from ejkernel.kernels._delta.problem import DeltaProblem
from ejkernel.kernels._implementation import Signature


def delta_problem(
    query, key, value, beta, g=None, softmax_scale=None, initial_state=None, reverse=False, cu_seqlens=None, *,
    use_qk_l2norm=False,
) -> DeltaProblem:  # fmt: skip
    """The gated delta rule; see `DeltaProblem` for the recurrence and the shapes."""
    return DeltaProblem.from_arguments(
        query, key, value, beta, g, softmax_scale=softmax_scale, initial_state=initial_state, reverse=reverse,
        cu_seqlens=cu_seqlens, use_qk_l2norm=use_qk_l2norm,
    )  # fmt: skip


GATED_DELTA_RULE = Signature("gated_delta_rule", delta_problem, GatedDeltaRuleConfig)
