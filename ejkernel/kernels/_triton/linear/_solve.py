"""A call solved along its route, with its own gradient."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from ejkernel._kept import RECURRENCE_OUTPUT, RECURRENCE_STATES, named
from ejkernel._meshes import inside_shard_map
from ejkernel._reverse_only import differentiable_once, not_differentiable
from ejkernel._varying import vary, varying_axes
from ejkernel.kernels._linear.batching import foldable
from ejkernel.kernels._triton.linear._call import Call
from ejkernel.kernels._triton.linear._chunks import Array, owner
from ejkernel.kernels._triton.linear._mesh import over_explicit_axes, split_backward, split_forward
from ejkernel.kernels._triton.linear.routes import Route

COMPARE_ALL = 1 << 22  # comparisons that one small kernel does faster than a search, which takes a dozen


def solve_along(route: Route, arrays: dict[str, Array], cu_seqlens: Array | None) -> tuple[Array, Array]:
    """(output [B, T, H, V], final state [N, H, K, V]); arrays: those of a problem's `differentiable`."""
    # Under `shard_map` an array that is the same on all shards is made to vary like the others first: the gradient of that step
    # is the sum over the shards, which the array's own type asks for.
    axes = varying_axes(*arrays.values(), *(() if cu_seqlens is None else (cu_seqlens,)))
    arrays = {name: vary(x, axes) for name, x in arrays.items()}

    def run(arrays: dict[str, Array], cu_seqlens: Array | None) -> tuple[Array, Array]:
        return (_solve_jitted if inside_shard_map() else _solve)(route, differentiable_once(arrays), cu_seqlens)

    return over_explicit_axes(run, arrays, None if cu_seqlens is None else vary(cu_seqlens, axes))


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Taken:
    """The route that the forward pass took, among what the backward pass gets of it."""

    route: Route


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _solve(route: Route, arrays: dict[str, Array], cu_seqlens: Array | None) -> tuple[Array, Array]:
    return _forward(route, False, arrays, cu_seqlens)[:2]


def _solve_forward(route: Route, arrays: dict[str, Any], cu_seqlens: Any) -> Any:
    route = route.differentiated(constant_decay="g_gamma" in arrays and arrays["g_gamma"].perturbed)
    arrays = {name: x.value for name, x in arrays.items()}
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.value
    route = route.agreed(arrays, cu_seqlens)
    output, *rest = _forward(route, True, not_differentiable(arrays), cu_seqlens)
    output, (final, saved) = named(RECURRENCE_OUTPUT, output), named(RECURRENCE_STATES, rest)
    return (output, final), (Taken(route), arrays, cu_seqlens, saved)


def _solve_backward(_: Route, residuals: Any, cotangents: Any) -> Any:
    taken, arrays, cu_seqlens, saved = residuals
    doutput, dfinal = cotangents
    if isinstance(doutput, SymbolicZero):
        doutput = jnp.zeros(doutput.shape, doutput.dtype)
    dfinal = None if isinstance(dfinal, SymbolicZero) else dfinal
    doutput, dfinal = not_differentiable((doutput, dfinal))
    grads = _backward(taken.route, arrays, cu_seqlens, saved, doutput, dfinal)
    return grads, None if cu_seqlens is None else np.zeros(cu_seqlens.shape, jax.dtypes.float0)


_solve.defvjp(_solve_forward, _solve_backward, symbolic_zeros=True)
_solve_jitted = jax.jit(_solve, static_argnums=(0,))


# Jitted with the route as a static argument, so that calls outside `jit` trace and compile once for each shape.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward(
    route: Route, keep: bool, arrays: dict[str, Array], cu_seqlens: Array | None
) -> tuple[Array, Array, dict[str, Any]]:
    """(output, final state, what the gradient starts from if it is to be kept)."""

    results = foldable(split_forward(route, keep), arrays=arrays, cu_seqlens=cu_seqlens)
    return results["output"], results["final"], results["saved"]


@functools.partial(jax.jit, static_argnums=(0,))
def _backward(
    route: Route, arrays: dict[str, Array], cu_seqlens: Array | None, saved: dict[str, Any], doutput: Array,
    dfinal: Array | None,
) -> dict[str, Array]:  # fmt: skip
    launch = split_backward(route, functools.partial(gradients_along, route))
    return foldable(launch, arrays=arrays, cu_seqlens=cu_seqlens, saved=saved, doutput=doutput, dfinal=dfinal)


def gradients_along(
    route: Route, arrays: dict[str, Array], cu_seqlens: Array | None, saved: dict[str, Any], doutput: Array,
    dfinal: Array | None,
) -> dict[str, Array]:  # fmt: skip
    """The gradient of every array, in its own shape and dtype."""
    call = Call.of(route.plan, arrays, cu_seqlens, saved.get("log_decays"))
    found = route.backward(call, saved, doutput, dfinal)
    grads: dict[str, Array | None] = {**found._asdict(), "g": found.log_decay}
    if "g_gamma" in arrays:
        dlog = found.log_decay
        unasked = jnp.zeros_like(arrays["g_gamma"])  # by routes without a gradient of the log decays
        grads["g_gamma"] = unasked if dlog is None else _per_sequence(dlog, cu_seqlens)
    return {name: _reduced(grads[name], x) for name, x in arrays.items()}


def _per_sequence(dlog: Array, cu_seqlens: Array | None) -> Array:
    """[N, H]: a gradient per token [B, T, H] summed over each sequence, in the same order every time (a scatter's is not)."""
    if cu_seqlens is None:
        return jnp.sum(dlog, 1)
    rows, (T, N) = dlog[0], (dlog.shape[1], cu_seqlens.shape[0] - 1)
    tokens = jnp.arange(T, dtype=cu_seqlens.dtype)
    sequence = owner(cu_seqlens, tokens, COMPARE_ALL)
    if N * T <= COMPARE_ALL:
        own = sequence[None] == jnp.arange(N, dtype=sequence.dtype)[:, None]  # [N, T]
        return jnp.sum(jnp.where(own[..., None], rows[None], 0), 1)
    follows = jnp.concatenate([jnp.zeros(1, bool), sequence[1:] == sequence[:-1]])[:, None]
    together = lambda a, b: (a[0] & b[0], jnp.where(b[0], a[1], 0) + b[1])
    _, running = jax.lax.associative_scan(together, (follows, rows))  # sums since a sequence's first token
    last = jnp.maximum(cu_seqlens[1:] - 1, 0)
    return jnp.where((jnp.diff(cu_seqlens) > 0)[:, None], running[last], 0)


def _reduced(grad: Array | None, x: Array) -> Array:
    """A gradient per query head as its input's: summed over the heads of a group, in the input's dtype."""
    assert grad is not None
    if grad.shape != x.shape:
        B, T, h = x.shape[:3]
        grad = jnp.sum(grad.reshape(B, T, h, grad.shape[2] // h, *grad.shape[3:]).astype(jnp.float32), 3)
    return grad.astype(x.dtype)
