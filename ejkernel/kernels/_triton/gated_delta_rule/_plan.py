"""What of a call of the delta rule is known when it is traced: its plan, and with it how sequences are cut into segments."""

from __future__ import annotations

import dataclasses

from ejkernel.callib import cdiv
from ejkernel.kernels._delta import DeltaProblem, GatedDeltaRuleConfig
from ejkernel.kernels._triton.linear._chunks import length_to_fill
from ejkernel.kernels._triton.linear._plan import Plan, tile

PACKED_PROGRAMS = 160  # a little more than an H200 has multiprocessors


def delta_plan(problem: DeltaProblem, cfg: GatedDeltaRuleConfig) -> Plan:
    """A call's plan.

    Packed sequences are cut only where one of them may hold nearly all chunks and leave the device to few programs: what a
    segment's end costs here, where its transition is a matrix, is as much as scanning it. Where shared memory has no room for
    such a matrix, no sequence is cut.
    """
    plan = Plan.of(problem, cfg)
    B, T, H, _, V = problem.shape
    if not _room_for_transition(plan):
        return dataclasses.replace(plan, segment=max(1, cdiv(T, plan.C) + problem.sequences))
    across = max(1, H * cdiv(V, 64))  # programs that scan one segment
    if problem.cu_seqlens is None:
        length = length_to_fill(cdiv(T, plan.C), B * across, plan.min_segment)
    else:
        length = max(plan.min_segment, cdiv(T // plan.C + problem.sequences, cdiv(PACKED_PROGRAMS, across)))
    return dataclasses.replace(plan, segment=max(1, length))


def _room_for_transition(plan: Plan) -> bool:
    """Whether a program of `delta_segment_starts` has room for the transition of a segment, [K, K], and the state's tile."""
    width = tile(plan.K, 256)
    return width * (width + 64) * plan.operand.itemsize <= plan.shared
