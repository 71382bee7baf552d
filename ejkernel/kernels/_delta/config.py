"""How the gated delta rule runs: data that the executor picks and a platform reads."""

from __future__ import annotations

import dataclasses

from ejkernel.kernels._linear.config import LinearConfig


@dataclasses.dataclass(frozen=True)
class GatedDeltaRuleConfig(LinearConfig):
    """How `gated_delta_rule` runs; the fields are those of `LinearConfig`, which both recurrences read alike.

    Example:
        >>> GatedDeltaRuleConfig("recurrent", block_q=16).schedule
        'recurrent'
    """
