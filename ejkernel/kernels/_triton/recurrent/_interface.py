"""`recurrent` on triton: NVIDIA GPUs from compute capability 8.0."""

from __future__ import annotations

from ejkernel.kernels._linear.platform_function import LinearFunction, recurrent_problem
from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._triton.recurrent._candidates import candidates
from ejkernel.kernels._triton.recurrent._heuristics import heuristic
from ejkernel.kernels._triton.recurrent._solve import solve, supports

recurrent = kernel_registry.register("recurrent", Platform.TRITON, Backend.GPU, priority=10)(
    LinearFunction(recurrent_problem, solve, heuristic, candidates, supports)
)
