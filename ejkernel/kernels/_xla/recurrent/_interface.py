"""`recurrent` on xla, and how this platform picks its configs."""

from __future__ import annotations

from ejkernel.kernels._linear.platform_function import LinearFunction, recurrent_problem
from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._xla.recurrent._heuristics import candidates, heuristic
from ejkernel.kernels._xla.recurrent._solve import solve

recurrent = kernel_registry.register("recurrent", Platform.XLA, Backend.ANY)(
    LinearFunction(recurrent_problem, solve, heuristic, candidates)
)
