"""The linear operations as the registry takes them today, each over `TritonLinear`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ejkernel.kernels._linear import LinearConfig, LinearProblem
from ejkernel.kernels._linear.platform_function import LinearFunction
from ejkernel.kernels._registry import Backend, Platform, kernel_registry
from ejkernel.kernels._triton.linear import TritonLinear

_HOW = TritonLinear()


def _solve(problem: LinearProblem, cfg: LinearConfig) -> Any:
    if (reason := _HOW.refuses(problem, cfg)) is not None:
        raise ValueError(f"{reason}.")
    return _HOW.solve(problem, cfg)


def registered(name: str, problem_of: Callable[..., LinearProblem]) -> LinearFunction:
    function = LinearFunction(problem_of, _solve, _HOW.heuristic, _HOW.candidates, _HOW.supports)
    return kernel_registry.register(name, Platform.TRITON, Backend.GPU, priority=10)(function)
