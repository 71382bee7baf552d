"""How the gated delta rule runs: data that the executor picks and a platform reads."""

from __future__ import annotations

import dataclasses

from ejkernel.kernels._linear.config import RecurrenceConfig


@dataclasses.dataclass(frozen=True)
class GatedDeltaRuleConfig(RecurrenceConfig):
    """How `gated_delta_rule` runs; the fields are those of `RecurrenceConfig`.

    Example:
        >>> GatedDeltaRuleConfig("recurrent", block_q=16).schedule
        'recurrent'
    """
