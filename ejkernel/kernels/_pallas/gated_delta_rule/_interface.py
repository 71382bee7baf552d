"""`gated_delta_rule` on pallas: TPUs from v4."""

from __future__ import annotations

from ejkernel.kernels._delta import GATED_DELTA_RULE
from ejkernel.kernels._pallas.gated_delta_rule._platform import PallasDeltaRule
from ejkernel.kernels._registry import Backend, Platform, kernel_registry

gated_delta_rule = GATED_DELTA_RULE.register(PallasDeltaRule(), kernel_registry, Platform.PALLAS, Backend.TPU, priority=10)
