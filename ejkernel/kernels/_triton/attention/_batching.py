"""`vmap` of a call as one larger call: the mapped axis is folded into the batch.

M mapped calls of batch B are one call of batch M * B. Arrays of tokens that are not mapped are repeated; masks, biases and ids
that all rows share stay one. What is mapped and has one entry for a call (sinks, a scale, ids) is repeated for its rows.

Calls run one after another where each has a mask or a bias [1, heads, T, S] of its own for several rows of its batch: folding
would repeat it for every row. So does the gradient of a bias that rows or heads share, which is a sum over one call's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel._varying import vary, varying_axes
from ejkernel.kernels._linear.batching import one_by_one
from ejkernel.kernels._triton.attention._plan import varies

Array = jax.Array
Args = dict[str, Any]  # arrays by name, some in dicts of their own
OF_A_CALL = ("sinks", "traced_scale")  # no axis for the batch
PLANES = ("bias", "mask")
IDS = ("q_segment_ids", "kv_segment_ids", "q_positions", "kv_positions")


def mapped_calls(
    function: Callable[[Args], dict[str, Array]], size: int, mapped: Args, args: Args, *, bias_gradient: bool, fold: bool = True
) -> tuple[dict[str, Array], dict[str, bool]]:
    """What `size` calls give, and what of it is mapped: the rule of `custom_vmap`.

    Args:
        function: the call itself.
        mapped: whether each array has the mapped axis, which is its first.
        bias_gradient: whether it gives the gradient of a bias: every call its own.
        fold: whether many calls can be one.
    """
    if size == 0:
        found = _of_none(function, mapped, args)
    elif fold and _folds(mapped, args):
        folded = function(_folded(size, mapped, args, bias_gradient))
        found = {name: x.reshape(size, -1, *x.shape[1:]) for name, x in folded.items()}
    else:
        found = one_by_one(function, mapped, args)
    return found, dict.fromkeys(found, True)


def _batch(mapped: Args, args: Args) -> int:
    """The rows of one call."""
    return args["arrays"]["query"].shape[int(mapped["arrays"]["query"])]


def _folds(mapped: Args, args: Args) -> bool:
    rows = _batch(mapped, args)
    planes = [(mapped[kind].get(name), args[kind].get(name)) for kind in ("arrays", "others") for name in PLANES]
    return not any(is_mapped and x.shape[1] < rows and varies(x[0]) for is_mapped, x in planes if x is not None)


def _folded(size: int, mapped: Args, args: Args, bias_gradient: bool) -> Args:
    rows = _batch(mapped, args)
    ids_mapped = any(mapped["others"].get(name) for name in IDS)  # all of them are alike in having rows of their own

    def fold(path: Any, is_mapped: bool, x: Array) -> Array:
        name = path[-1].key
        own = {"bias": bias_gradient, **dict.fromkeys(IDS, ids_mapped)}.get(name, name not in (*PLANES, *OF_A_CALL))
        if not is_mapped and not own and (name in OF_A_CALL or x.shape[0] == 1):
            return x
        if not is_mapped:
            x = jnp.broadcast_to(x, (size, *x.shape))
        if name in OF_A_CALL:
            x = x[:, None]
        if x.shape[1] < rows:
            x = jnp.broadcast_to(x, (size, rows, *x.shape[2:]))
        return x.reshape(-1, *x.shape[2:])

    return jax.tree_util.tree_map_with_path(fold, mapped, args)


def _of_none(function: Callable[[Args], dict[str, Array]], mapped: Args, args: Args) -> dict[str, Array]:
    """The results of no calls at all, which no kernel is started for."""
    axes = varying_axes(*jax.tree.leaves(args))
    one = jax.tree.map(lambda m, x: jax.ShapeDtypeStruct(x.shape[1:] if m else x.shape, x.dtype), mapped, args)
    return jax.tree.map(lambda x: vary(jnp.zeros((0, *x.shape), x.dtype), axes), jax.eval_shape(function, one))
