"""`lightning_attn` on triton: the same core as `recurrent`."""

from __future__ import annotations

from ejkernel.kernels._linear.platform_function import LinearFunction, lightning_problem
from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._triton.recurrent._candidates import candidates
from ejkernel.kernels._triton.recurrent._heuristics import heuristic
from ejkernel.kernels._triton.recurrent._solve import solve, supports

lightning_attn = kernel_registry.register("lightning_attn", Platform.TRITON, Backend.GPU, priority=10)(
    LinearFunction(lightning_problem, solve, heuristic, candidates, supports)
)
