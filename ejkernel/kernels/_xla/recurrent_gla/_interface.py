"""`recurrent_gla` on xla: the same core as `recurrent`."""

from __future__ import annotations

from ejkernel.kernels._linear.platform_function import LinearFunction, gla_problem
from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._xla.recurrent._heuristics import candidates, heuristic
from ejkernel.kernels._xla.recurrent._solve import solve

recurrent_gla = kernel_registry.register("recurrent_gla", Platform.XLA, Backend.ANY)(
    LinearFunction(gla_problem, solve, heuristic, candidates)
)
