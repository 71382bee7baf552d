"""The gated delta rule on TPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from ejkernel.kernels._delta import DeltaProblem, GatedDeltaRuleConfig
from ejkernel.kernels._pallas._chips import LANES
from ejkernel.kernels._pallas._recurrence import PallasRecurrence, chip_of_call, decodes, fitting, plan_of
from ejkernel.kernels._pallas.gated_delta_rule.routes import route_of
from ejkernel.kernels._pallas.linear._plan import LEAST_ROWS, Blocks, Plan
from ejkernel.kernels._pallas.linear._platform import figures
from ejkernel.kernels._pallas.linear._route import Route

MOST_ROWS = 128
USUAL_ROWS = {"bfloat16": 64, "float32": 32}  # longer chunks cost digits where keys are alike and beta is near 2
HEADS = 4
STATES = 7  # that the backward pass has in VMEM for each head: three arrays with two buffers each, and the adjoint
# Rows of as many channels as keys and values have together that a token of a head spills from registers, by libtpu's figures:
# with a gate per key channel or not, with products of bfloat16 operands or not.
SPILLED = {(True, False): 40, (True, True): 22, (False, False): 14, (False, True): 7}


class PallasDeltaRule(PallasRecurrence[DeltaProblem, GatedDeltaRuleConfig]):
    """The delta rule with any gate on TPUs from v4.

    What a field of a configuration does:

        schedule   "recurrent": token by token, for up to 16 tokens that are not packed (the gradient is always by chunks)
        block_q    tokens per chunk, 16 to 128
        block_h    heads of a block, at most: fewer where they do not divide the call's heads or part a group
    """

    max_channels = 256

    def plan(self, problem: DeltaProblem, cfg: GatedDeltaRuleConfig) -> Plan:
        _, _, _, K, V = problem.shape
        room = chip_of_call(problem).vmem_limit // 2 // (STATES * 4 * K * V)
        return plan_of(problem, cfg, max(1, min(cfg.block_h or HEADS, room)))

    def taken(self, problem: DeltaProblem, cfg: GatedDeltaRuleConfig) -> Route:
        return route_of(problem, cfg, self.plan(problem, cfg))

    def refuses(self, problem: DeltaProblem, cfg: GatedDeltaRuleConfig) -> str | None:
        if (reason := super().refuses(problem, cfg)) is not None:
            return reason
        if cfg.schedule == "chunked" and not LEAST_ROWS <= cfg.block_q <= MOST_ROWS:
            return f"block_q must be a power of two from {LEAST_ROWS} to {MOST_ROWS} on pallas; got {cfg.block_q}"
        chip, needs = chip_of_call(problem), vmem(problem, self.plan(problem, cfg))
        if needs > chip.vmem_limit:
            return f"its blocks need {figures(needs, chip)}: use a smaller block_q or block_h"
        return None

    def heuristic(self, problem: DeltaProblem) -> GatedDeltaRuleConfig:
        """The usual chunk, with as many heads as VMEM holds: it holds one on every chip."""
        rows = fitting(problem, USUAL_ROWS[str(problem.query.dtype)])
        first = GatedDeltaRuleConfig("recurrent" if decodes(problem) else "chunked", rows, platform="pallas", backend="tpu")
        return self._with_heads_that_fit(problem, first)

    def _with_heads_that_fit(self, problem: DeltaProblem, cfg: GatedDeltaRuleConfig) -> GatedDeltaRuleConfig:
        """The same chunk with fewer heads of a block, where VMEM does not hold them."""
        while self.refuses(problem, cfg) is not None and (heads := together(problem, self.plan(problem, cfg))) > 1:
            cfg = dataclasses.replace(cfg, block_h=heads // 2)
        return cfg

    def candidates(self, problem: DeltaProblem) -> Sequence[GatedDeltaRuleConfig]:
        """The heuristic first; other chunks, with as many heads as VMEM holds."""
        first = self.heuristic(problem)
        others = [dataclasses.replace(first, block_q=fitting(problem, rows), block_h=None) for rows in (32, 64, 128)]
        found = dict.fromkeys([first, *(self._with_heads_that_fit(problem, cfg) for cfg in others)])
        return [cfg for cfg in found if self.refuses(problem, cfg) is None]

    def solve(self, problem: DeltaProblem, cfg: GatedDeltaRuleConfig) -> tuple[jax.Array, jax.Array]:
        output, final = super().solve(problem.normalised(), cfg)
        return problem.finish(output), final


def together(problem: DeltaProblem, plan: Plan) -> int:
    """Heads of a block."""
    B, _, H, K, V = problem.shape
    return Blocks(plan, B, 1, H, K, V, (H // problem.key_heads, 1)).together


def vmem(problem: DeltaProblem, plan: Plan) -> int:
    """Bytes of VMEM that the backward pass needs, about: it holds most."""
    _, _, _, K, V = problem.shape
    K, V, heads = -(-K // LANES) * LANES, -(-V // LANES) * LANES, together(problem, plan)
    per_token = (2 if plan.narrow else 4) * (4 * K + 3 * V)  # q, k, dq, dk; v, do, dv
    per_token += 4 * 2 * K * problem.per_channel
    state = 4 * K * V
    # while one is computed with, the next is read; beta and its gradient take whole registers
    buffers = 2 * (heads * (plan.rows * per_token + 3 * state) + plan.rows * 4 * 2 * LANES)
    spilled = heads * (4 * plan.rows * SPILLED[problem.per_channel, plan.narrow] * (K + V) + 2 * state)
    return buffers + heads * state + spilled
