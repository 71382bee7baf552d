"""Linear attention on TPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from ejkernel.kernels._linear import LinearConfig, LinearProblem
from ejkernel.kernels._linear.config import Schedule
from ejkernel.kernels._pallas._chips import LANES, MIB, Chip
from ejkernel.kernels._pallas._recurrence import PallasRecurrence, chip_of_call, decodes, fitting, plan_of
from ejkernel.kernels._pallas.linear._plan import LEAST_ROWS, Plan
from ejkernel.kernels._pallas.linear._route import Route
from ejkernel.kernels._pallas.linear.routes import chunked_route, route_of

HEADS, DECODED_HEADS = 4, 8  # of a block


class PallasLinear(PallasRecurrence[LinearProblem, LinearConfig]):
    """The recurrence with any gates on TPUs from v4.

    What a field of a configuration does:

        schedule   "recurrent": token by token, for up to 16 tokens that are not packed (the gradient is always by chunks)
        block_q    tokens per chunk, at least 16
        block_h    heads of a block, at most: fewer where they do not divide the call's heads or part a group
    """

    max_channels = 512

    def plan(self, problem: LinearProblem, cfg: LinearConfig) -> Plan:
        return plan_of(problem, cfg, cfg.block_h or HEADS)

    def taken(self, problem: LinearProblem, cfg: LinearConfig) -> Route:
        return route_of(problem, cfg, self.plan(problem, cfg))

    def supports(self, problem: LinearProblem) -> str | None:
        if (reason := super().supports(problem)) is not None:
            return reason
        least = self.plan(problem, LinearConfig(block_q=LEAST_ROWS, block_h=1))
        needs, has = vmem(problem, least), chip_of_call(problem).vmem_limit
        if needs > has:
            _, _, _, K, V = problem.shape
            return f"a state of {K} x {V} needs {figures(needs, chip_of_call(problem))}: use platform='xla'"
        return None

    def refuses(self, problem: LinearProblem, cfg: LinearConfig) -> str | None:
        if (reason := super().refuses(problem, cfg)) is not None:
            return reason
        longest = chunked_route(problem).longest
        if cfg.schedule == "chunked" and not LEAST_ROWS <= cfg.block_q <= longest:
            return f"block_q must be from {LEAST_ROWS} to {longest} on pallas with these gates; got {cfg.block_q}"
        chip = chip_of_call(problem)
        needs, has = vmem(problem, self.plan(problem, cfg)), chip.vmem_limit
        if needs > has:
            return f"its blocks need {figures(needs, chip)}: use a smaller block_q or block_h"
        return None

    def heuristic(self, problem: LinearProblem) -> LinearConfig:
        """By the compiler's schedules for v5e and v6e (benchmarks/RESULTS.md); nothing was measured on a TPU."""
        schedule: Schedule = "recurrent" if decodes(problem) else "chunked"
        heads = DECODED_HEADS if schedule == "recurrent" else HEADS
        rows = fitting(problem, chunked_route(problem).usual(chip_of_call(problem)))
        found = LinearConfig(schedule, rows, platform="pallas", backend="tpu", block_h=heads)
        while self.refuses(problem, found) is not None:  # wide channels, or little VMEM
            assert found.block_h is not None
            if found.block_h > 1:
                found = dataclasses.replace(found, block_h=found.block_h // 2)
            elif found.block_q > LEAST_ROWS:
                found = dataclasses.replace(found, block_q=found.block_q // 2)
            else:
                break
        return found

    def candidates(self, problem: LinearProblem) -> Sequence[LinearConfig]:
        """The heuristic first; chunks and heads that are ever best by the compiler's schedules."""
        first, tiles = self.heuristic(problem), chunked_route(problem).tiles
        if first.schedule == "recurrent":
            changes: list[dict[str, Any]] = [{"block_h": heads} for heads in (4, 16)]
        else:
            changes = [{"block_q": fitting(problem, rows), "block_h": heads} for rows, heads in tiles]
        found = dict.fromkeys([first, *(dataclasses.replace(first, **change) for change in changes)])
        return [cfg for cfg in found if self.refuses(problem, cfg) is None]


def figures(needs: int, chip: Chip) -> str:
    """Bytes that are too many, rounded up, and how many there are."""
    return f"about {needs / MIB + 0.05:.1f} MiB of VMEM and a kernel has {chip.vmem_limit / MIB:.1f} MiB on {chip.name}"


def vmem(problem: LinearProblem, plan: Plan) -> int:
    """Bytes of VMEM that the backward pass needs, about: it holds most. Fitted to what libtpu says of the kernels."""
    _, _, H, K, V = problem.shape
    K, V, heads = -(-K // LANES) * LANES, -(-V // LANES) * LANES, min(plan.heads, H)
    per_token = (2 if plan.narrow else 4) * (4 * K + 3 * V)  # q, k, dq, dk; v, do, dv
    per_token += 4 * 2 * K * (problem.gk is not None) + 4 * 2 * V * (problem.gv is not None)
    state = 4 * K * V
    buffers = 2 * heads * (plan.rows * per_token + 3 * state)  # while one is computed with, the next is read
    if problem.gk is None and problem.gv is None:
        temporary = 4 * plan.rows * (6 * max(plan.rows, LANES) + 12 * (K + V)) + 4 * state
    else:  # rows of the tree of decays, which registers do not hold, for every head
        all_gates = None not in (problem.g, problem.gk, problem.gv)  # keeps one more row of each token
        rows, states = ((12 + all_gates) * heads, 2) if plan.narrow else (24 * heads + 1, 4)
        temporary = 4 * plan.rows * rows * (K + V) + states * state
    return buffers + heads * state + temporary
