"""A linear-attention problem solved by XLA, differentiable in both modes.

Reverse mode is the chunked backward pass with the inputs and one state per run as residuals; forward mode differentiates
the forward loops. Both hang on one derivative rule through `linear_map`, so `jax.jvp`, `jax.grad` and their compositions
work; derivatives of derivatives are JAX's own, of the chunked form.
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
from ejkernel._meshes import run_partitioned
from ejkernel._sizes import known
from ejkernel._varying import alike
from ejkernel.kernels._linear import LinearConfig, LinearProblem
from ejkernel.kernels._linear.problem import DIFFERENTIABLE, EMPTY
from ejkernel.kernels._xla._transposable import call, linear_map
from ejkernel.kernels._xla.linear import _scan
from ejkernel.kernels._xla.linear._heuristics import chunks_together
from ejkernel.kernels._xla.linear._scan import Plan

Array = jax.Array


def solve(problem: LinearProblem, cfg: LinearConfig) -> tuple[Array, Array]:
    """(output `[B, T, H, V]` in `problem.output_dtype`, final state `[N, H, K, V]`)."""
    if problem.empty:
        return problem.of_no_tokens()
    given = ((name, getattr(problem, name)) for name in (*DIFFERENTIABLE, "cu_seqlens"))
    arrays = alike({name: x for name, x in given if x is not None})
    plan = _plan(problem, cfg)

    def run(arrays: dict[str, Array]) -> tuple[Array, Array]:
        cu_seqlens = arrays.pop("cu_seqlens", None)
        return _solve(plan, arrays, cu_seqlens)

    return run_partitioned(run, arrays, *problem.splits())


def route(problem: LinearProblem, cfg: LinearConfig) -> str:
    """Which way a call goes: step by step, or in chunks, of which the loop may take several at a time."""
    if problem.empty:
        return EMPTY
    plan = _plan(problem, cfg)
    gates = "gates per channel" if problem.gk is not None or problem.gv is not None else "gates per head"
    chunks = f"chunks of {plan.rows}, {plan.chunks} at a time, {gates}"
    return chunks if plan.schedule == "chunked" else f"step by step (gradient: {chunks})"


def _plan(problem: LinearProblem, cfg: LinearConfig) -> Plan:
    tokens = problem.shape[1]
    rows = min(cfg.block_q, 1 << (tokens - 1).bit_length()) if known(tokens) else cfg.block_q
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
    output, final = call(_Forward(plan, tuple(arrays), cu_seqlens is not None), *_flat(arrays, cu_seqlens))
    return output, final


@functools.partial(_solve.defjvp, symbolic_zeros=True)
def _solve_jvp(plan: Plan, primals: Any, tangents: Any) -> Any:
    arrays, cu_seqlens = primals
    moving = {name: t for name, t in tangents[0].items() if not isinstance(t, SymbolicZero)}
    flat, packed = _flat(arrays, cu_seqlens), cu_seqlens is not None
    output, *kept = call(_Forward(plan, tuple(arrays), packed, keep_states=True), *flat)
    output, (final, states) = named(RECURRENCE_OUTPUT, output), named(RECURRENCE_STATES, kept)
    if not moving:
        return (output, final), (jnp.zeros_like(output), jnp.zeros_like(final))
    tangent = _Derivative(plan, tuple(arrays), tuple(moving), packed)
    out = linear_map(tangent, dataclasses.replace(tangent, transposed=True), [*flat, states], list(moving.values()))
    return (output, final), tuple(out)


def _flat(arrays: dict[str, Array], cu_seqlens: Array | None) -> list[Array]:
    return [*arrays.values(), *([] if cu_seqlens is None else [cu_seqlens])]


@dataclasses.dataclass(frozen=True)
class _Forward:
    """`(*arrays, cu_seqlens?) -> (output, final)`, and the state before each run when the gradient wants them.

    Those states are no result but something kept: their derivative is 0, and whoever takes them as an argument computes its
    own derivative from the arrays.
    """

    plan: Plan
    names: tuple[str, ...]
    packed: bool
    keep_states: bool = False
    is_plain: bool = False

    def __call__(self, *flat: Array) -> list[Array]:
        arrays = dict(zip(self.names, flat, strict=False))
        forward = functools.partial(_forward, self.plan, self.keep_states, arrays, flat[-1] if self.packed else None)
        if not self.is_plain:
            return [x for x in forward() if x is not None]
        found = list(_plain(self.plan, arrays, flat[-1] if self.packed else None))
        if self.keep_states:
            states = jax.eval_shape(forward)[2]
            found.append(jnp.zeros(states.shape, states.dtype))
        return found

    def plain(self) -> _Forward:
        return dataclasses.replace(self, is_plain=True)

    def varies(self, mapped: Sequence[bool]) -> tuple[bool, ...]:
        """Only the output depends on the query."""
        state = any(mapped[i] for i in range(len(mapped)) if i >= len(self.names) or self.names[i] != "query")
        return (any(mapped), state, state) if self.keep_states else (any(mapped), state)


@dataclasses.dataclass(frozen=True)
class _Derivative:
    """The derivative of `_solve` in the `moving` arrays, or its transpose, over flat arguments.

    `(*arrays, cu_seqlens?, states, *tangents of moving) -> (doutput, dfinal)`, transposed
    `(*arrays, cu_seqlens?, states, doutput, dfinal) -> cotangents of moving`.
    """

    plan: Plan
    names: tuple[str, ...]
    moving: tuple[str, ...]
    packed: bool
    transposed: bool = False
    is_plain: bool = False

    def __call__(self, *flat: Array) -> list[Array]:
        count = len(self.names)
        arrays, states = dict(zip(self.names, flat, strict=False)), flat[count + self.packed]
        cu_seqlens = flat[count] if self.packed else None
        rest = flat[count + self.packed + 1 :]
        if not self.transposed:
            tangents = dict(zip(self.moving, rest, strict=True))
            return list(_tangents(self.plan, self.is_plain, arrays, cu_seqlens, tangents))
        if self.is_plain:
            run = lambda some: _plain(self.plan, {**arrays, **some}, cu_seqlens)
            grads = jax.vjp(run, {name: arrays[name] for name in self.moving})[1]((rest[0], rest[1]))[0]
        else:
            grads = _backward(self.plan, self.moving, arrays, cu_seqlens, states, *rest)
        return [grads[name] for name in self.moving]

    def plain(self) -> _Derivative:
        return dataclasses.replace(self, is_plain=True)

    def varies(self, mapped: Sequence[bool]) -> tuple[bool, ...]:
        """As for `_Forward`; every gradient depends on all there is."""
        if self.transposed:
            return (any(mapped),) * len(self.moving)
        names = (*self.names, *[""] * (1 + self.packed), *self.moving)
        return any(mapped), any(m for m, name in zip(mapped, names, strict=True) if name != "query")


# Jitted with the plan as a static argument, so that calls outside `jit` compile once for each shape.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward(
    plan: Plan, keep_states: bool, arrays: dict[str, Array], cu_seqlens: Array | None
) -> tuple[Array, Array, Array | None]:
    return _scan.forward(plan, arrays, cu_seqlens, keep_states)


@functools.partial(jax.jit, static_argnums=(0,))
def _plain(plan: Plan, arrays: dict[str, Array], cu_seqlens: Array | None) -> tuple[Array, Array]:
    """(output, final state) by loops whose length is known, which JAX differentiates in reverse mode too."""
    plain = dataclasses.replace(plan, schedule="chunked", known_length=True)
    return _scan.forward(plain, arrays, cu_seqlens, False)[:2]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _tangents(
    plan: Plan, plain: bool, arrays: dict[str, Array], cu_seqlens: Array | None, moving: dict[str, Array]
) -> tuple[Array, Array]:
    def run(some: dict[str, Array]) -> tuple[Array, Array]:
        if plain:
            return _plain(plan, {**arrays, **some}, cu_seqlens)
        return _scan.forward(plan, {**arrays, **some}, cu_seqlens, False)[:2]

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
    return _scan.backward(plan, arrays, cu_seqlens, states, doutput, dfinal, wanted)
