"""`recurrent_gla` on triton: the same core as `recurrent`."""

from __future__ import annotations

from ejkernel.kernels._linear.platform_function import LinearFunction, gla_problem
from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._triton.recurrent._candidates import candidates
from ejkernel.kernels._triton.recurrent._heuristics import heuristic
from ejkernel.kernels._triton.recurrent._solve import solve, supports

recurrent_gla = kernel_registry.register("recurrent_gla", Platform.TRITON, Backend.GPU, priority=10)(
    LinearFunction(gla_problem, solve, heuristic, candidates, supports)
)
