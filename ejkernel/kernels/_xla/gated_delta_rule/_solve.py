"""The delta rule solved by XLA, differentiable in both modes.

Reverse mode is the chunked backward pass with the inputs and one state per chunk as residuals; forward mode
differentiates the forward loop. Both hang on one derivative rule (`_transposable`). Loops have known lengths, so that JAX can
differentiate either again.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from ejkernel._kept import RECURRENCE_OUTPUT, RECURRENCE_STATES, named
from ejkernel.kernels._delta import DeltaProblem, GatedDeltaRuleConfig
from ejkernel.kernels._linear.axes import SPLIT_TIME
from ejkernel.kernels._linear.problem import EMPTY
from ejkernel.kernels._xla._common.explicit_mesh import over_explicit_axes
from ejkernel.kernels._xla._transposable import linear_map
from ejkernel.kernels._xla.gated_delta_rule import _loop
from ejkernel.kernels._xla.gated_delta_rule._alike import alike
from ejkernel.kernels._xla.gated_delta_rule._loop import Plan

Array = jax.Array
DIFFERENTIABLE = ("query", "key", "value", "beta", "g", "initial_state")


def solve(problem: DeltaProblem, cfg: GatedDeltaRuleConfig) -> tuple[Array, Array]:
    """(output `[B, T, H, V]` in `problem.output_dtype`, final state `[N, H, K, V]`)."""
    if problem.empty:
        return problem.of_no_tokens()
    given = {name: x for name in (*DIFFERENTIABLE, "cu_seqlens") if (x := getattr(problem, name)) is not None}
    arrays = dict(zip(given, alike(list(given.values())), strict=True))
    cu_seqlens = arrays.pop("cu_seqlens", None)
    batch, heads, values = ("value", 0), ("value", 2), ("value", 3)
    placed = (batch, None, heads, values), (None if cu_seqlens is not None else batch, heads, ("key", 3), values)
    run = over_explicit_axes(functools.partial(_solve, _plan(problem, cfg)), arrays, placed, _loop.PER_TOKEN, SPLIT_TIME)
    return run(arrays, cu_seqlens)


def route(problem: DeltaProblem, cfg: GatedDeltaRuleConfig) -> str:
    """Which way a call goes: step by step or in chunks, whose products follow the gate."""
    if problem.empty:
        return EMPTY
    gate = "gate per key channel" if problem.per_channel else "no gate" if problem.g is None else "gate per head"
    chunks = f"chunks of {_plan(problem, cfg).rows}, {gate}"
    return chunks if cfg.schedule == "chunked" else f"step by step (gradient: {chunks})"


def _plan(problem: DeltaProblem, cfg: GatedDeltaRuleConfig) -> Plan:
    T = problem.shape[1]
    rows = min(cfg.block_q, 1 << (T - 1).bit_length()) if isinstance(T, int) else cfg.block_q
    return Plan(
        schedule=cfg.schedule,
        rows=rows,
        scale=problem.scale,
        reverse=problem.reverse,
        use_qk_l2norm=problem.use_qk_l2norm,
        state=problem.state_dtype,
        output=problem.output_dtype,
        on_cpu=problem.device.backend == "cpu",
    )


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _solve(plan: Plan, arrays: dict[str, Array], cu_seqlens: Array | None) -> tuple[Array, Array]:
    output, final = _forward(plan, False, arrays, cu_seqlens)
    return output, final


@functools.partial(_solve.defjvp, symbolic_zeros=True)
def _solve_jvp(plan: Plan, primals: Any, tangents: Any) -> Any:
    arrays, cu_seqlens = primals
    moving = {name: t for name, t in tangents[0].items() if not isinstance(t, SymbolicZero)}
    output, *kept = _forward(plan, True, arrays, cu_seqlens)
    output, (final, states) = named(RECURRENCE_OUTPUT, output), named(RECURRENCE_STATES, kept)
    if not moving:
        return (output, final), (jnp.zeros_like(output), jnp.zeros_like(final))
    tangent = _Derivative(plan, tuple(arrays), tuple(moving), cu_seqlens is not None)
    residuals = [*arrays.values(), states, *([] if cu_seqlens is None else [cu_seqlens])]
    out = linear_map(tangent, dataclasses.replace(tangent, transposed=True), residuals, list(moving.values()))
    return (output, final), tuple(out)


@dataclasses.dataclass(frozen=True)
class _Derivative:
    """The derivative of `_solve` in the `moving` arrays, or its transpose, over flat arguments.

    `(*arrays, states, cu_seqlens?, *tangents of moving) -> (doutput, dfinal)`, transposed
    `(*arrays, states, cu_seqlens?, doutput, dfinal) -> cotangents of moving`.
    """

    plan: Plan
    names: tuple[str, ...]
    moving: tuple[str, ...]
    packed: bool
    transposed: bool = False

    def plain(self) -> _Derivative:
        """JAX can differentiate it as it is."""
        return self

    def varies(self, mapped: Sequence[bool]) -> tuple[bool, ...]:
        """All results or none: the arguments are mapped alike."""
        return (any(mapped),) * (len(self.moving) if self.transposed else 2)

    def __call__(self, *flat: Array) -> list[Array]:
        count = len(self.names)
        arrays, states = dict(zip(self.names, flat[:count], strict=True)), flat[count]
        cu_seqlens = flat[count + 1] if self.packed else None
        rest = flat[count + 1 + self.packed :]
        if self.transposed:
            grads = _backward(self.plan, self.moving, arrays, cu_seqlens, states, *rest)
            return [grads[name] for name in self.moving]
        return list(_tangents(self.plan, arrays, cu_seqlens, dict(zip(self.moving, rest, strict=True))))


# Jitted with the plan as a static argument, so that calls outside `jit` compile once for each shape.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward(plan: Plan, keep_states: bool, arrays: dict[str, Array], cu_seqlens: Array | None) -> tuple[Array, ...]:
    return _loop.forward(plan, arrays, cu_seqlens, keep_states)


@functools.partial(jax.jit, static_argnums=(0,))
def _tangents(plan: Plan, arrays: dict[str, Array], cu_seqlens: Array | None, moving: dict[str, Array]) -> tuple[Array, ...]:
    run = lambda some: _loop.forward(plan, {**arrays, **some}, cu_seqlens, False)
    return jax.jvp(run, ({name: arrays[name] for name in moving},), (moving,))[1]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _backward(
    plan: Plan,
    wanted: tuple[str, ...],
    arrays: dict[str, Array],
    cu_seqlens: Array | None,
    states: Array,
    doutput: Array,
    dfinal: Array,
) -> dict[str, Array]:
    return _loop.backward(plan, wanted, arrays, cu_seqlens, states, doutput, dfinal)
