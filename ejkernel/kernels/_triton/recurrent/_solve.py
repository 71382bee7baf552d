"""A linear-attention problem solved by Triton kernels, with its own gradient."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero

from ejkernel.kernels._linear import LinearConfig, LinearProblem
from ejkernel.kernels._triton.recurrent import _launch, _launch_both, _launch_key, _launch_wide
from ejkernel.kernels._triton.recurrent._batching import foldable
from ejkernel.kernels._triton.recurrent._candidates import refusal
from ejkernel.kernels._triton.recurrent._launch import Call, shape, sides
from ejkernel.kernels._triton.recurrent._plan import MAX_CHANNELS, Array, Plan, owner
from ejkernel.kernels._triton.recurrent._reverse_only import differentiable_once, not_differentiable

DIFFERENTIABLE = ("query", "key", "value", "g", "g_gamma", "gk", "gv", "initial_state")


def supports(problem: LinearProblem) -> str | None:
    """Why the kernels cannot take a call; None when they can."""
    _, _, _, K, V = problem.shape
    if jnp.float64 in {x.dtype for x in jax.tree.leaves(problem)}:
        return "Triton kernels sum in float32; float64 is for platform='xla'"
    if max(K, V) > MAX_CHANNELS:
        return f"key and value channels go up to {MAX_CHANNELS}; got {K} and {V}"
    return None


def solve(problem: LinearProblem, cfg: LinearConfig) -> tuple[Array, Array]:
    """(output `[B, T, H, V]` in `problem.output_dtype`, final state `[N, H, K, V]`). ValueError for a cfg it cannot follow."""
    B, T, H, K, V = problem.shape
    if (reason := refusal(problem, cfg)) is not None:
        raise ValueError(f"{reason}.")
    if T == 0 or B == 0:
        state = problem.initial_state
        empty = jnp.zeros((B, T, H, V), problem.output_dtype)
        return empty, jnp.zeros((problem.sequences, H, K, V), problem.state_dtype) if state is None else state
    arrays = {name: getattr(problem, name) for name in DIFFERENTIABLE if getattr(problem, name) is not None}
    return _solve(Plan.of(problem, cfg), differentiable_once(arrays), problem.cu_seqlens)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Wanted:
    """Which gradients are asked for, as far as it changes the work."""

    constant_decay: bool  # of g_gamma


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _solve(plan: Plan, arrays: dict[str, Array], cu_seqlens: Array | None) -> tuple[Array, Array]:
    return _forward(plan, None, arrays, cu_seqlens)[:2]


def _solve_forward(plan: Plan, arrays: dict[str, Any], cu_seqlens: Any) -> Any:
    wanted = Wanted("g_gamma" in arrays and arrays["g_gamma"].perturbed)
    arrays = {name: x.value for name, x in arrays.items()}
    cu_seqlens = None if cu_seqlens is None else cu_seqlens.value
    output, final, saved = _forward(plan, wanted, not_differentiable(arrays), cu_seqlens)
    return (output, final), (wanted, arrays, cu_seqlens, saved)


def _solve_backward(plan: Plan, residuals: Any, cotangents: Any) -> Any:
    wanted, arrays, cu_seqlens, saved = residuals
    doutput, dfinal = cotangents
    if isinstance(doutput, SymbolicZero):
        doutput = jnp.zeros(doutput.shape, doutput.dtype)
    grads = _backward(plan, wanted, arrays, cu_seqlens, saved, doutput, None if isinstance(dfinal, SymbolicZero) else dfinal)
    return grads, None if cu_seqlens is None else np.zeros(cu_seqlens.shape, jax.dtypes.float0)


_solve.defvjp(_solve_forward, _solve_backward, symbolic_zeros=True)


def _by_passes(call: Call, wanted: Wanted) -> bool:
    """Whether the gradient is three forward passes in other roles, which need no states: when no gate asks for one."""
    _, _, _, K, V = call.dims
    no_gate = call.gated_by_head and call.get("g") is None and not wanted.constant_decay
    return no_gate and _launch.one_pass(call, K) and _launch.one_pass(call, V)


# Jitted with the plan as a static argument, so that calls outside `jit` trace and compile once for each shape.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward(
    plan: Plan, wanted: Wanted | None, arrays: dict[str, Array], cu_seqlens: Array | None
) -> tuple[Array, Array, dict[str, Any]]:
    """(output, final state, what the gradient starts from). wanted=None: no gradient will be asked for."""

    def launch(arrays: dict[str, Array], cu_seqlens: Array | None) -> dict[str, Any]:
        return dict(zip(("output", "final", "saved"), _launch_forward(plan, wanted, arrays, cu_seqlens), strict=True))

    results = foldable(launch, arrays=arrays, cu_seqlens=cu_seqlens)
    return results["output"], results["final"], results["saved"]


def _launch_forward(
    plan: Plan, wanted: Wanted | None, arrays: dict[str, Array], cu_seqlens: Array | None
) -> tuple[Array, Array, dict[str, Any]]:
    call = Call.of(plan, arrays, cu_seqlens)
    if plan.schedule == "recurrent":
        return (*_launch.step_by_step(call), {})
    if _launch_wide.fits(call):
        return _launch_wide.forward(call, wanted is not None)
    if call.gated_by_head:
        keep = wanted is not None and not _by_passes(call, wanted)
        output, final, states = _launch.scalar_forward(call, keep)
        return output, final, {"states": states, **call.kept_sums} if keep else {}
    if _launch_key.fits(call):
        return _launch_key.forward(call, wanted is not None)
    if _launch_both.fits(call):
        return _launch_both.forward(call, wanted is not None)
    starts, final = _launch.walk(call, arrays["key"], arrays["value"], call.get("initial_state"))
    key, value = sides(call, None)
    key_pairs = _launch.gated_pairs(call, key)
    B, T, H, _, V = call.dims
    (output,) = _launch.one_side(call, value, key, key_pairs, starts, None, {"dx": shape((B, T, H, V), plan.output)})
    saved = {"states": starts} if key_pairs is None else {"states": starts, "pairs": key_pairs}
    return output, final, {} if wanted is None else saved


@functools.partial(jax.jit, static_argnums=(0,))
def _backward(
    plan: Plan, wanted: Wanted, arrays: dict[str, Array], cu_seqlens: Array | None, saved: dict[str, Any], doutput: Array,
    dfinal: Array | None,
) -> dict[str, Array]:  # fmt: skip
    launch = functools.partial(_launch_backward, plan, wanted)
    return foldable(launch, arrays=arrays, cu_seqlens=cu_seqlens, saved=saved, doutput=doutput, dfinal=dfinal)


def _launch_backward(
    plan: Plan, wanted: Wanted, arrays: dict[str, Array], cu_seqlens: Array | None, saved: dict[str, Any], doutput: Array,
    dfinal: Array | None,
) -> dict[str, Array]:  # fmt: skip
    call = Call.of(plan, arrays, cu_seqlens, saved.get("sums"))
    q, k, v = (arrays[name] for name in ("query", "key", "value"))
    grads: dict[str, Array | None] = {}
    if _by_passes(call, wanted):
        passes = _launch.scalar_backward_by_passes(call, doutput, dfinal)
        grads["query"], grads["key"], grads["value"], grads["initial_state"] = passes
        if "g_gamma" in arrays:
            grads["g_gamma"] = jnp.zeros_like(arrays["g_gamma"])  # nobody asks for it
        return {name: _reduced(grads[name], x) for name, x in arrays.items()}
    if not saved:  # the call itself went step by step and kept nothing
        for launches in (_launch_wide, _launch_key, _launch_both):
            if launches.fits(call):
                _, _, saved = launches.forward(call, keep=True)
    starts = saved["states"] if "states" in saved else _launch.walk(call, k, v, call.get("initial_state"))[0]
    if _launch_wide.fits(call) or (call.gated_by_head and _launch.one_pass(call, q.shape[3])):
        if _launch_wide.fits(call):
            walked = _launch_wide.adjoint(call, doutput, saved, dfinal)
        else:
            walked = _launch.scalar_backward_of_value(call, doutput, dfinal)
        grads["value"], ends, grads["initial_state"] = walked
        grads["query"], grads["key"], _, dlog = _launch.scalar_backward(call, doutput, starts, ends, of_value=False)
    elif call.gated_by_head:
        ends, grads["initial_state"] = _launch.walk(call, q, doutput, dfinal, adjoint=True)
        grads["query"], grads["key"], grads["value"], dlog = _launch.scalar_backward(call, doutput, starts, ends, of_value=True)
    else:
        dlog = _gated_backward(call, doutput, saved, starts, dfinal, grads)
    grads["g"] = dlog
    if "g_gamma" in arrays:
        assert dlog is not None
        grads["g_gamma"] = _per_sequence(dlog, cu_seqlens)
    return {name: _reduced(grads[name], x) for name, x in arrays.items()}


def _gated_backward(
    call: Call, do: Array, saved: dict[str, Any], starts: Array, dfinal: Array | None, grads: dict[str, Array | None]
) -> Array | None:
    """Fills in all gradients per query head but g's and g_gamma's; returns that of the head's own log decay [B, T, H]."""
    key, value = sides(call, do)
    B, T, H, K, V = call.dims
    by_head = "g" in call.arrays or "g_gamma" in call.arrays
    on_key = by_head and key.gate is not None

    def gate(name: str, channels: int, summed: bool) -> dict[str, jax.ShapeDtypeStruct]:
        x = call.get(name)
        if x is None:
            return {}
        return {"dg": shape((B, T, H, channels), np.float32 if summed else _launch.per_head_dtype(call, x))}

    q = call.arrays["query"]
    key_out = {"dx": shape(q.shape, q.dtype), "dy": shape((B, T, H, K), _launch.per_head_dtype(call, key.y))}
    key_out |= gate("gk", K, on_key)
    value_out = {"dy": shape((B, T, H, V), _launch.per_head_dtype(call, value.y)), **gate("gv", V, by_head and not on_key)}
    if _launch_key.fits(call) or _launch_both.fits(call):
        prepared = _launch_key.Prepared(*(saved[name] for name in _launch_key.Prepared._fields))
    if _launch_both.fits(call):
        of_keys, of_values, grads["initial_state"] = _launch_both.backward(
            call, do, prepared, saved["value_strength"], (saved["arranged"], saved["near"]), starts, dfinal, key_out, value_out
        )
    elif _launch_key.fits(call):
        dv, ends, grads["initial_state"] = _launch_key.adjoint(call, do, prepared, dfinal)
        of_keys, of_values = _launch_key.backward(call, do, prepared, starts, ends, key_out), [dv]
    else:
        pairs = saved["pairs"] if "pairs" in saved else _launch.gated_pairs(call, key)
        ends, grads["initial_state"] = _launch.walk(call, q, do, dfinal, adjoint=True)
        of_keys = _launch.one_side(call, key, value, _launch.gated_pairs(call, value), starts, ends, key_out)
        of_values = _launch.one_side(call, value, key, pairs, starts, ends, value_out)
    grads["query"], grads["key"], *dgk = of_keys
    grads["value"], *dgv = of_values
    grads["gk"], grads["gv"] = dgk[0] if dgk else None, dgv[0] if dgv else None
    if not by_head:
        return None
    folded = grads["gk"] if on_key else grads["gv"]
    assert folded is not None
    return jnp.sum(folded, -1)


def _per_sequence(dlog: Array, cu_seqlens: Array | None) -> Array:
    """[N, H]: a gradient per token [B, T, H] summed over each sequence."""
    if cu_seqlens is None:
        return jnp.sum(dlog, 1)
    tokens = jnp.arange(dlog.shape[1], dtype=cu_seqlens.dtype)
    sequence = owner(cu_seqlens, tokens)
    return jax.ops.segment_sum(dlog[0], sequence, num_segments=cu_seqlens.shape[0] - 1)


def _reduced(grad: Array | None, x: Array) -> Array:
    """A gradient per query head as its input's: summed over the heads of a group, in the input's dtype."""
    assert grad is not None
    if grad.shape != x.shape:
        B, T, h = x.shape[:3]
        grad = jnp.sum(grad.reshape(B, T, h, grad.shape[2] // h, *grad.shape[3:]).astype(jnp.float32), 3)
    return grad.astype(x.dtype)
