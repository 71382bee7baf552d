"""A call with its own gradient, on one device or part by part on many."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_batching import custom_vmap
from jaxtyping import Array, Float

from ejkernel._meshes import run_partitioned
from ejkernel._reverse_only import differentiable_once, not_differentiable, of_platform
from ejkernel._varying import vary, varying_axes
from ejkernel.kernels._attention import AttentionProblem
from ejkernel.kernels._attention.logits import alike_varying
from ejkernel.kernels._pallas.attention._plan import Plan
from ejkernel.kernels._pallas.attention._splash import NO_KEY, NO_QUERY, backward, forward
from ejkernel.parallel.partition import Axes, Roles, partitioned

ADVICE = (
    "A query attends to all keys and channels, so only batch and heads are split: gather the other axis first, with "
    "jax.sharding.reshard(x, jax.P(...)) that names None there."
)
REFUSALS = of_platform("pallas")
DIFFERENTIABLE = ("query", "key", "value", "sinks")
ROLES: dict[str, Roles] = {
    **dict.fromkeys(("query", "output", "d_output"), ("batch", "queries", "heads", "channels")),
    **dict.fromkeys(("key", "value"), ("batch", "keys", "heads", "channels")),
    "lse": ("batch", "heads", "queries"),
    "sinks": ("batch", "heads"),
    "q_ids": ("batch", "queries"),
    "kv_ids": ("batch", "keys"),
}


def splash_output(problem: AttentionProblem, plan: Plan) -> Float[Array, "B T H V"]:
    """The output in the compute dtype."""
    if 0 in (*problem.query.shape, problem.kv_len, problem.value_dim):
        return jnp.zeros((*problem.query.shape[:3], problem.value_dim), problem.dtype)
    problem = alike_varying(problem)
    arrays = _arrays(problem)

    def attend(given: dict[str, Array]) -> tuple[Array]:
        axes = varying_axes(*given.values())
        alike = {name: vary(x, axes) for name, x in given.items()}
        moving = differentiable_once({name: x for name, x in alike.items() if name in DIFFERENTIABLE}, REFUSALS)
        return (_attend(plan, moving, {name: x for name, x in alike.items() if name not in moving}),)

    roles = {name: ROLES[name] for name in arrays}
    return run_partitioned(attend, arrays, roles, (ROLES["output"],), ("batch", "heads"), ADVICE, by_hand=True)[0]


def _arrays(problem: AttentionProblem) -> dict[str, Array]:
    """What the kernels take, each with all rows of the batch."""
    scale = problem.scale if problem.traced_scale is None else problem.traced_scale
    query = (problem.query.astype(jnp.float32) * scale).astype(problem.dtype)
    arrays = {"query": query, "key": problem.key, "value": problem.value}
    q_ids, kv_ids = problem.q_segment_ids, problem.kv_segment_ids
    if problem.mask is not None:  # over keys alone
        q_ids = jnp.zeros((1, problem.q_len), jnp.int32) if q_ids is None else q_ids
        kv_ids = jnp.zeros((1, problem.kv_len), jnp.int32) if kv_ids is None else kv_ids
        kv_ids = jnp.where(jnp.broadcast_to(problem.mask[:, 0, 0], (problem.mask.shape[0], problem.kv_len)), kv_ids, NO_KEY)
    if q_ids is not None and kv_ids is not None:
        ids = {"q_ids": (q_ids, NO_QUERY), "kv_ids": (kv_ids, NO_KEY)}
        narrow = {name: jnp.where(x < 0, none, x).astype(jnp.int32) for name, (x, none) in ids.items()}
        arrays |= {name: jnp.broadcast_to(x, (problem.batch, x.shape[1])) for name, x in narrow.items()}
    if problem.sinks is not None:
        arrays["sinks"] = jnp.broadcast_to(problem.sinks.astype(jnp.float32), (problem.batch, problem.heads))
    return arrays


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: Plan, arrays: dict[str, Any], ids: dict[str, Any]) -> Array:
    return _forward(plan, False, arrays, ids)[0]


def _attend_forward(plan: Plan, arrays: dict[str, Any], ids: dict[str, Any]) -> Any:
    # The gradient of a sink is a sum over all rows of the output that nearly cancels, so it does not bear a rounded one.
    output, lse = _forward(plan, "sinks" in arrays, not_differentiable(arrays, REFUSALS), ids)
    return output.astype(arrays["query"].dtype), (arrays, ids, output, lse)


def _attend_backward(plan: Plan, kept: Any, d_output: Array) -> Any:
    grads = _backward(plan, *kept, not_differentiable(d_output, REFUSALS))
    return grads, jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), kept[1])


_attend.defvjp(_attend_forward, _attend_backward)


# Jitted with the plan as a static argument, so that calls outside `jit` trace and compile once for each shape.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _forward(plan: Plan, wide: bool, arrays: dict[str, Any], ids: dict[str, Any]) -> tuple[Array, Array]:
    launch = lambda args: dict(zip(("output", "lse"), forward(plan, args, wide), strict=True))
    found = _over_mesh(launch, {**arrays, **ids}, ("lse", "output"))
    return found["output"], found["lse"]


@functools.partial(jax.jit, static_argnums=(0,))
def _backward(
    plan: Plan, arrays: dict[str, Any], ids: dict[str, Any], output: Array, lse: Array, d_output: Array
) -> dict[str, Any]:
    def launch(args: dict[str, Any]) -> dict[str, Any]:
        given = {name: x for name, x in args.items() if name in arrays or name in ids}
        return backward(plan, given, args["output"], args["lse"], args["d_output"])

    args = {**arrays, **ids, "output": output, "lse": lse, "d_output": d_output}
    return _over_mesh(launch, args, tuple(sorted(arrays)))


def _over_mesh(
    launch: Callable[[dict[str, Any]], dict[str, Any]], args: dict[str, Any], results: tuple[str, ...]
) -> dict[str, Any]:
    """`launch(args)`, part by part where the program runs on several devices. What `vmap` maps are more rows of the batch."""
    names = tuple(sorted(args))
    axes = lambda: Axes(names, tuple(ROLES[name] for name in names), tuple(ROLES[name] for name in results))
    call = custom_vmap(lambda args: partitioned(launch, args, axes))

    @call.def_vmap
    def of_many(size: int, flags: Any, args: dict[str, Any]) -> tuple[dict[str, Any], dict[str, bool]]:
        (mapped,) = flags
        wide = {name: x if mapped[name] else jnp.broadcast_to(x, (size, *x.shape)) for name, x in args.items()}
        folded = {name: x.reshape(-1, *x.shape[2:]) for name, x in wide.items()}
        found = _over_mesh(launch, folded, results)
        return {name: x.reshape(size, -1, *x.shape[1:]) for name, x in found.items()}, dict.fromkeys(found, True)

    return call(args)
