"""The delta rule as every platform offers it: names, order and defaults of its arguments are the problem's."""

from __future__ import annotations

from ejkernel.kernels._delta.config import GatedDeltaRuleConfig
from ejkernel.kernels._delta.problem import DeltaProblem
from ejkernel.kernels._implementation import Signature

GATED_DELTA_RULE = Signature("gated_delta_rule", DeltaProblem.from_arguments, GatedDeltaRuleConfig)
