"""A call with its own gradient."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ejkernel._kept import ATTENTION_OUTPUT, ATTENTION_SUMS, named
from ejkernel._meshes import inside_shard_map
from ejkernel._reverse_only import differentiable_once, not_differentiable
from ejkernel._varying import vary, varying_axes
from ejkernel.kernels._attention import AttentionProblem
from ejkernel.kernels._attention.logits import alike_varying
from ejkernel.kernels._triton.attention._launches import backward, forward, shared_gradients
from ejkernel.kernels._triton.attention._mesh import over_explicit_axes, over_mesh
from ejkernel.kernels._triton.attention._plan import Plan

DIFFERENTIABLE = ("query", "key", "value", "bias", "sinks", "traced_scale")
IDS = ("q_segment_ids", "kv_segment_ids", "q_positions", "kv_positions")


def flash_output(problem: AttentionProblem, plan: Plan) -> Float[Array, "B T H V"]:
    """The output in the compute dtype."""
    if 0 in (*problem.query.shape, problem.kv_len, problem.value_dim):
        return jnp.zeros((*problem.query.shape[:3], problem.value_dim), problem.dtype)
    problem = alike_varying(problem)
    arrays = {name: x for name in DIFFERENTIABLE if (x := getattr(problem, name)) is not None}
    others = {name: x for name in ("mask", *IDS, "dropout_words") if (x := getattr(problem, name)) is not None}
    # One row of ids may serve the whole batch; all of them are then alike in that.
    rows = max((others[name].shape[0] for name in IDS if name in others), default=1)
    others |= {name: jnp.broadcast_to(others[name], (rows, others[name].shape[1])) for name in IDS if name in others}

    def attend(given: dict[str, Array]) -> tuple[Array]:
        axes = varying_axes(*given.values())
        alike = {name: vary(x, axes) for name, x in given.items()}
        split = lambda names: {name: alike[name] for name in names}
        run = _attend_jitted if inside_shard_map() else _attend
        return (run(plan, differentiable_once(split(arrays)), split(others)),)

    return over_explicit_axes(attend, {**arrays, **others})


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, arrays: dict[str, Any], others: dict[str, Any]) -> Array:
    return _forward(plan, arrays, others)[0]


def _attend_forward(plan: Plan, arrays: dict[str, Any], others: dict[str, Any]) -> Any:
    bias_moves = "bias" in arrays and arrays["bias"].perturbed
    arrays = {name: x.value for name, x in arrays.items()}
    others = {name: x.value for name, x in others.items()}
    output, lse = _forward(plan, not_differentiable(arrays), others)
    output, lse = named(ATTENTION_OUTPUT, output), named(ATTENTION_SUMS, lse)
    return output, (_Moves(bias_moves), arrays, others, output, lse)


def _attend_backward(plan: Plan, kept: Any, d_output: Any) -> Any:
    moves, arrays, others, output, lse = kept
    if not isinstance(d_output, Array):  # a symbolic zero
        d_output = jnp.zeros(d_output.shape, d_output.dtype)
    grads = _backward(plan, moves.bias, arrays, others, output, lse, not_differentiable(d_output))
    return grads, jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), others)


_attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)
_attend_jitted = jax.jit(_attend, static_argnums=(0,))


@jax.tree_util.register_static
class _Moves:
    """Whether the gradient of the bias is wanted, among what the backward pass gets of the forward pass."""

    def __init__(self, bias: bool):
        self.bias = bias

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Moves) and self.bias == other.bias

    def __hash__(self) -> int:
        return hash(self.bias)


# Jitted with the plan as a static argument, so that calls outside `jit` trace and compile once for each shape.
@functools.partial(jax.jit, static_argnums=(0,))
def _forward(plan: Plan, arrays: dict[str, Any], others: dict[str, Any]) -> tuple[Array, Array]:
    launch = lambda args: dict(zip(("output", "lse"), forward(plan, args["arrays"], args["others"]), strict=True))
    found = over_mesh(launch, {"arrays": arrays, "others": others}, ("lse", "output"))
    return found["output"], found["lse"]


@functools.partial(jax.jit, static_argnums=(0, 1))
def _backward(
    plan: Plan, bias: bool, arrays: dict[str, Any], others: dict[str, Any], output: Array, lse: Array, d_output: Array
) -> dict[str, Any]:
    args = {"arrays": arrays, "others": others, "output": output, "lse": lse, "d_output": d_output}
    launch = lambda args: backward(plan, **args, bias=bias)
    results = ["query", "key", "value", "delta"]
    results += ["bias"] if bias else []
    results += ["dscale"] if "traced_scale" in arrays else []
    found = over_mesh(launch, args, tuple(sorted(results)), bias_gradient=bias)
    grads = {name: found[name] for name in arrays if name in found} | shared_gradients(plan, arrays, lse, found)
    if "bias" in arrays and not bias:
        grads["bias"] = vary(jnp.zeros_like(arrays["bias"]), varying_axes(arrays["bias"]))
    return grads
