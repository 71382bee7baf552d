"""What every platform of the delta rule shares: the problem, its checks, the config and the signature."""

from ejkernel.kernels._delta.config import GatedDeltaRuleConfig
from ejkernel.kernels._delta.problem import DeltaProblem
from ejkernel.kernels._delta.signature import GATED_DELTA_RULE

__all__ = ["GATED_DELTA_RULE", "DeltaProblem", "GatedDeltaRuleConfig"]
