"""A linear-attention problem solved by XLA, differentiable in both modes.

Reverse mode is the chunked backward pass with the inputs and one state per slot as residuals; forward mode differentiates
the forward loops. Both hang on one derivative rule through `linear_map`, so `jax.jvp`, `jax.grad` and their compositions work.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero

from ejkernel.kernels._linear import LinearConfig, LinearProblem
from ejkernel.kernels._xla.linear import _walk
from ejkernel.kernels._xla.linear._heuristics import chunks_together
from ejkernel.kernels._xla.linear._transposable import linear_map
from ejkernel.kernels._xla.linear._walk import Plan

Array = jax.Array
DIFFERENTIABLE = ("query", "key", "value", "g", "g_gamma", "gk", "gv", "initial_state")


def solve(problem: LinearProblem, cfg: LinearConfig) -> tuple[Array, Array]:
    """(output `[B, T, H, V]` in `problem.output_dtype`, final state `[N, H, K, V]`)."""
    B, T, H, K, V = problem.shape
    if T == 0 or B == 0:
        state = problem.initial_state
        empty = jnp.zeros((B, T, H, V), problem.output_dtype)
        return empty, jnp.zeros((problem.sequences, H, K, V), problem.state_dtype) if state is None else state
    arrays = {name: getattr(problem, name) for name in DIFFERENTIABLE if getattr(problem, name) is not None}
    return _solve(_plan(problem, cfg), arrays, problem.cu_seqlens)


def route(problem: LinearProblem, cfg: LinearConfig) -> str:
    """Which way a call goes: step by step, or in chunks, of which the loop may take several at a time."""
    if 0 in problem.shape[:2]:
        return "empty"
    plan = _plan(problem, cfg)
    gates = "gates per channel" if problem.gk is not None or problem.gv is not None else "gates per head"
    chunks = f"chunks of {plan.rows}, {plan.chunks} at a time, {gates}"
    return chunks if plan.schedule == "chunked" else f"step by step (gradient: {chunks})"


def _plan(problem: LinearProblem, cfg: LinearConfig) -> Plan:
    rows = min(cfg.block_q, 1 << (problem.shape[1] - 1).bit_length())
    return Plan(
        schedule=cfg.schedule,
        rows=rows,
        chunks=chunks_together(problem, rows),
        scale=problem.scale,
        reverse=problem.reverse,
        state=problem.state_dtype,
        operand=_operand_dtype(problem),
        output=problem.output_dtype,
        on_cpu=problem.device.backend == "cpu",
    )


def _operand_dtype(problem: LinearProblem) -> Any:
    """bfloat16 inputs multiply in bfloat16 on accelerators; on CPUs, which widen them anyway, in the state's float32.

    float16 always multiplies in float32: a state may pass float16's largest number, 65504.
    """
    narrow = all(x.dtype == jnp.bfloat16 for x in (problem.query, problem.key, problem.value))
    if narrow and problem.device.backend != "cpu":
        return jnp.dtype(jnp.bfloat16)
    return problem.state_dtype


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _solve(plan: Plan, arrays: dict[str, Array], cu_seqlens: Array | None) -> tuple[Array, Array]:
    return _forward(plan, False, arrays, cu_seqlens)[:2]


@functools.partial(_solve.defjvp, symbolic_zeros=True)
def _solve_jvp(plan: Plan, primals: Any, tangents: Any) -> Any:
    arrays, cu_seqlens = primals
    moving = {name: t for name, t in tangents[0].items() if not isinstance(t, SymbolicZero)}
    output, final, states = _forward(plan, True, arrays, cu_seqlens)
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
def _forward(
    plan: Plan, keep_states: bool, arrays: dict[str, Array], cu_seqlens: Array | None
) -> tuple[Array, Array, Array | None]:
    return _walk.forward(plan, arrays, cu_seqlens, keep_states)


@functools.partial(jax.jit, static_argnums=(0,))
def _tangents(plan: Plan, arrays: dict[str, Array], cu_seqlens: Array | None, moving: dict[str, Array]) -> tuple[Array, Array]:
    run = lambda some: _walk.forward(plan, {**arrays, **some}, cu_seqlens, False)[:2]
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
    return _walk.backward(plan, arrays, cu_seqlens, states, doutput, dfinal, wanted)
