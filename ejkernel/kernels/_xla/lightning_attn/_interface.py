"""`lightning_attn` on xla: the same core as `recurrent`."""

from __future__ import annotations

from ejkernel.kernels._linear.platform_function import LinearFunction, lightning_problem
from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._xla.recurrent._heuristics import candidates, heuristic
from ejkernel.kernels._xla.recurrent._solve import solve

lightning_attn = kernel_registry.register("lightning_attn", Platform.XLA, Backend.ANY)(
    LinearFunction(lightning_problem, solve, heuristic, candidates)
)
