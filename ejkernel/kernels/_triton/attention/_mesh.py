"""How softmax attention on Triton splits over a mesh: every device computes its rows of the batch and its heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.custom_batching import custom_vmap

from ejkernel._meshes import run_partitioned
from ejkernel.kernels._triton.attention._batching import mapped_calls
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


def over_explicit_axes(function: Callable[[Any], tuple[Any]], arrays: dict[str, Any]) -> Any:
    """The output of arrays whose types may say how they are split: then each device runs the call on its part."""
    roles = {name: _roles(name, x) for name, x in arrays.items()}
    return run_partitioned(function, arrays, roles, (ROLES["output"],), ("batch", "heads"), ADVICE, by_hand=True)[0]


def _roles(name: str, x: Any) -> Roles:
    """What the axes of an array are. One of a single element serves everyone. Sinks and a scale of each row have its axis."""
    roles = ROLES[name]
    of_rows = ("batch", *roles) if x.ndim > len(roles) else roles
    return tuple(role if n > 1 else INSIDE for n, role in zip(x.shape, of_rows, strict=True))


def _has_own_bias(arrays: dict[str, Any]) -> bool:
    """Whether every row of the batch and every head has a bias of its own."""
    B, _, H, _ = arrays["query"].shape
    return bool(arrays["bias"].shape[:2] == (B, H))


def _sharing(bias: Any) -> Roles:
    """What has a bias in common: its gradient is a sum over it."""
    return tuple(role for role, n in zip(("batch", "heads"), bias.shape, strict=False) if n == 1)


def over_mesh(
    launch: Callable[[Any], dict[str, Any]], args: dict[str, Any], results: tuple[str, ...], *, bias_gradient: bool = False
) -> dict[str, Any]:
    """`launch(args)`, part by part where the program runs on several devices; `vmap` makes one larger call where it can.

    Args:
        results: the names of what it gives, in order.
        bias_gradient: whether the gradient of a bias is among them, and wanted.
    """
    call = custom_vmap(lambda args: _in_parts(launch, args, results, bias_gradient))

    @call.def_vmap
    def of_many(size: int, flags: Any, mapped: dict[str, Any]) -> tuple[dict[str, Any], dict[str, bool]]:
        again = lambda args: over_mesh(launch, args, results, bias_gradient=bias_gradient)
        # A gradient that is a sum over one call's rows or heads is lost where calls are folded into one.
        fold = not bias_gradient or _has_own_bias(args["arrays"])
        return mapped_calls(again, size, flags[0], mapped, bias_gradient=bias_gradient, fold=fold)

    return call(args)


def _in_parts(
    launch: Callable[[Any], dict[str, Any]], args: dict[str, Any], results: tuple[str, ...], bias_gradient: bool
) -> dict[str, Any]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(args)
    names = tuple(path[-1].key for path, _ in leaves)
    own = tuple(_roles(name, x) for name, (_, x) in zip(names, leaves, strict=True))
    bias = next((roles for name, roles in zip(names, own, strict=True) if name == "bias"), ())
    wanted = tuple(bias if name == "bias" else ROLES[name] for name in results)
    sums = tuple(_sharing(args["arrays"]["bias"]) if name == "bias" and bias_gradient else () for name in results)
    return partitioned(launch, args, lambda: Axes(names, own, wanted, sums))
