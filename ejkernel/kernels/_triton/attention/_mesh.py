"""How softmax attention on Triton splits over a mesh: every device computes its rows of the batch and its heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.custom_batching import custom_vmap

from ejkernel._meshes import run_partitioned
from ejkernel.kernels._triton.linear._batching import one_by_one
from ejkernel.parallel.partition import INSIDE, Axes, Roles, partitioned

ADVICE = (
    "A query attends to all keys and channels, so only batch and heads are split: gather the other axis first, with "
    "jax.sharding.reshard(x, jax.P(...)) that names None there."
)
TOKENS = ("batch", "time", "heads", "channels")
ROWS = ("batch", "heads", "time")
ROLES: dict[str, Roles] = {
    **dict.fromkeys(("query", "output", "d_output"), TOKENS),
    **dict.fromkeys(("key", "value"), ("batch", "keys", "heads", "channels")),
    **dict.fromkeys(("lse", "delta", "dscale"), ROWS),
    **dict.fromkeys(("bias", "mask"), ("batch", "heads", "time", "keys")),
    **dict.fromkeys(("q_segment_ids", "q_positions"), ("batch", "time")),
    **dict.fromkeys(("kv_segment_ids", "kv_positions"), ("batch", "keys")),
    "dropout_words": (*ROWS, INSIDE),
    "sinks": ("heads",),
    "traced_scale": (),
}


def shares_bias(arrays: dict[str, Any]) -> bool:
    """Whether rows of the batch, or heads, have a bias in common, so that its gradient is a sum over them."""
    if "bias" not in arrays:
        return False
    B, _, H, _ = arrays["query"].shape
    return arrays["bias"].shape[:2] != (B, H)


def over_explicit_axes(function: Callable[[Any], tuple[Any]], arrays: dict[str, Any]) -> Any:
    """The output of arrays whose types may say how they are split: then each device runs the call on its part."""
    roles = {name: _roles(name, x) for name, x in arrays.items()}
    return run_partitioned(function, arrays, roles, (ROLES["output"],), ("batch", "heads"), ADVICE, by_hand=True)[0]


def _roles(name: str, x: Any) -> Roles:
    """What the axes of an array are. One of a single element serves everyone."""
    return tuple(role if n > 1 else INSIDE for n, role in zip(x.shape, ROLES[name], strict=True))


def over_mesh(launch: Callable[[Any], dict[str, Any]], args: dict[str, Any], results: tuple[str, ...]) -> dict[str, Any]:
    """`launch(args)`, part by part where the program runs on several devices; calls that `vmap` maps run one after another.

    Args:
        results: the names of what it gives, in order.
    """
    call = custom_vmap(lambda args: _in_parts(launch, args, results))

    @call.def_vmap
    def of_many(_: int, flags: Any, args: dict[str, Any]) -> tuple[dict[str, Any], dict[str, bool]]:
        found = one_by_one(lambda args: over_mesh(launch, args, results), flags[0], args)
        return found, dict.fromkeys(found, True)

    return call(args)


def _in_parts(launch: Callable[[Any], dict[str, Any]], args: dict[str, Any], results: tuple[str, ...]) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(args)
    names = tuple(path[-1].key for path, _ in leaves)
    own = tuple(_roles(name, x) for name, (_, x) in zip(names, leaves, strict=True))
    bias = next((roles for name, roles in zip(names, own, strict=True) if name == "bias"), ())
    wanted = tuple(bias if name == "bias" else ROLES[name] for name in results)
    return partitioned(launch, args, lambda: Axes(names, own, wanted))
