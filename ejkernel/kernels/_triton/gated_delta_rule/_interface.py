"""`gated_delta_rule` on triton: NVIDIA GPUs from compute capability 8.0."""

from __future__ import annotations

from ejkernel.kernels._delta import GATED_DELTA_RULE
from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._triton.gated_delta_rule._platform import TritonDeltaRule

gated_delta_rule = GATED_DELTA_RULE.register(TritonDeltaRule(), kernel_registry, Platform.TRITON, Backend.GPU, priority=10)
