"""A recurrence on TPUs as the rest of the library sees it: what every family of them takes, refuses and computes."""

from __future__ import annotations

from typing import ClassVar, TypeVar

import jax
import jax.numpy as jnp

from ejkernel._device import interpretation
from ejkernel.kernels._delta import DeltaProblem
from ejkernel.kernels._implementation import Implementation
from ejkernel.kernels._linear import LinearProblem
from ejkernel.kernels._linear.config import RecurrenceConfig
from ejkernel.kernels._linear.problem import DECODED_TOKENS, EMPTY
from ejkernel.kernels._pallas._chips import Chip, chip_of, not_a_tpu
from ejkernel.kernels._pallas._meshes import split_by_the_compiler
from ejkernel.kernels._pallas.linear._plan import LEAST_ROWS, Plan
from ejkernel.kernels._pallas.linear._route import Route
from ejkernel.kernels._pallas.linear._solve import solve_along

P = TypeVar("P", bound=LinearProblem | DeltaProblem)
C = TypeVar("C", bound=RecurrenceConfig)
Array = jax.Array

WHY = {"float16": "the matrix unit takes no float16", "float64": "sums are in float32"}


class PallasRecurrence(Implementation[P, C]):
    """A recurrence on TPUs from v4, along one of its routes."""

    max_channels: ClassVar[int]

    def plan(self, problem: P, cfg: C) -> Plan:
        """What is static about a call."""
        raise NotImplementedError

    def taken(self, problem: P, cfg: C) -> Route:
        """The route of a call."""
        raise NotImplementedError

    def supports(self, problem: P) -> str | None:
        if (reason := not_a_tpu(problem.device)) is not None:
            return reason
        dtypes = {str(x.dtype) for x in problem.differentiable.values()}
        if wrong := dtypes - {"float32", "bfloat16"}:
            names = ", ".join(sorted(wrong))
            why = WHY.get(names, "arrays must be float32 or bfloat16")
            return f"{why}; got {names}: use bfloat16, float32 or platform='xla'"
        _, _, _, K, V = problem.shape
        if max(K, V) > self.max_channels:
            return f"key and value channels go up to {self.max_channels}, a state in VMEM; got {K} and {V}: use platform='xla'"
        return split_by_the_compiler(problem.device)

    def refuses(self, problem: P, cfg: C) -> str | None:
        if named := [name for name in cfg.tiles() if name != "block_h"]:
            return f"{' and '.join(named)} must be None on pallas, whose blocks hold all channels of a head and know no warps"
        if cfg.schedule == "recurrent":
            if problem.cu_seqlens is not None:
                return "schedule='recurrent' takes no packed sequences on pallas: use schedule='chunked'"
            if problem.shape[1] > DECODED_TOKENS:
                return f"schedule='recurrent' takes up to {DECODED_TOKENS} tokens on pallas; got {problem.shape[1]}"
        return None

    def route(self, problem: P, cfg: C) -> str:
        return EMPTY if problem.empty else self.taken(problem, cfg).name

    def solve(self, problem: P, cfg: C) -> tuple[Array, Array]:
        """(output in `problem.output_dtype`, final state)."""
        if problem.empty:
            return problem.of_no_tokens()
        return solve_along(self.taken(problem, cfg), problem.differentiable, problem.cu_seqlens)


def chip_of_call(problem: LinearProblem | DeltaProblem) -> Chip:
    chip = chip_of(problem.device)
    assert chip is not None  # else `supports` said no
    return chip


def plan_of(problem: LinearProblem | DeltaProblem, cfg: RecurrenceConfig, heads: int) -> Plan:
    """heads: of a block, at most."""
    return Plan(
        chip=chip_of_call(problem),
        rows=LEAST_ROWS if cfg.schedule == "recurrent" else cfg.block_q,
        heads=heads,
        scale=problem.scale,
        reverse=problem.reverse,
        narrow=all(x.dtype == jnp.bfloat16 for x in (problem.query, problem.key, problem.value)),
        output=problem.output_dtype,
        interpret=interpretation(),
    )


def decodes(problem: LinearProblem | DeltaProblem) -> bool:
    """Whether the heuristic takes a call token by token."""
    return problem.shape[1] <= DECODED_TOKENS and problem.cu_seqlens is None


def fitting(problem: LinearProblem | DeltaProblem, rows: int) -> int:
    """Rows of a chunk that is no longer than the call or the mean packed sequence."""
    tokens = problem.shape[1] // max(problem.sequences if problem.cu_seqlens is not None else 1, 1)
    return min(rows, max(LEAST_ROWS, 1 << max(tokens - 1, 0).bit_length()))
