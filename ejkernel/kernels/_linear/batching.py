"""`vmap` of a call as one larger call: the mapped axis is folded into the batch, or into the tokens of a packed call.

Dense: every array is [B, ...] or, per chunk, [B * chunks, ...], so M mapped calls are one call on [M * B, ...]. Packed: tokens
[1, T, ...] become [1, M * T, ...] and the sequences of call m begin m * T tokens later. What lies after the last sequence of a
call is one more sequence, usually empty, whose results are dropped. Arrays that are not mapped are repeated. What is kept per
chunk for the gradient of a packed call cannot be told apart afterwards (how many chunks a sequence has is data), so such calls
run one after another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from ejkernel._varying import vary, varying_axes

Array = jax.Array
PER_SEQUENCE = ("g_gamma", "initial_state", "final", "dfinal")  # [N, ...]; everything else is [B, T, ...] or per chunk
MAX_TOKENS = 2**31 - 1  # of one packed call: its tables hold tokens as int32


def foldable(function: Callable[..., dict[str, Any]], **args: Any) -> dict[str, Any]:
    """`function(**args)`, which `vmap` turns into one call on folded arguments where it can.

    Args:
        function: takes and returns (nested) dicts of arrays or None. Names tell what lies along the first axes:
            `cu_seqlens`, those of `PER_SEQUENCE`, `saved` (per chunk, in the order of the batch); all others are [B, T, ...].
    """

    call = custom_vmap(lambda args: function(**args))

    @call.def_vmap
    def of_many(size: int, flags: Any, args: dict[str, Any]) -> tuple[dict[str, Any], Any]:
        (mapped,) = flags
        if size == 0:
            results = _of_none(function, mapped, args)
        elif _folds(function, size, args, _one(mapped, args)):
            wide = jax.tree.map(lambda is_mapped, x: x if is_mapped else jnp.broadcast_to(x, (size, *x.shape)), mapped, args)
            results = _unfolded(size, wide, foldable(function, **_folded(size, wide)))
        else:
            results = one_by_one(lambda args: foldable(function, **args), mapped, args)
        return results, jax.tree.map(lambda _: True, results)

    return call(args)


def _one(mapped: Any, args: Any) -> Any:
    """The shapes of one of the mapped calls."""
    return jax.tree.map(lambda m, x: jax.ShapeDtypeStruct(x.shape[1:] if m else x.shape, x.dtype), mapped, args)


def _of_none(function: Callable[..., Any], mapped: Any, args: dict[str, Any]) -> dict[str, Any]:
    """The results of no calls at all, which no kernel is started for."""
    axes = varying_axes(*jax.tree.leaves(args))
    shapes = jax.eval_shape(lambda a: function(**a), _one(mapped, args))
    return jax.tree.map(lambda x: vary(jnp.zeros((0, *x.shape), x.dtype), axes), shapes)


def _folds(function: Callable[..., Any], size: int, args: dict[str, Any], one: dict[str, Any]) -> bool:
    if args.get("cu_seqlens") is None:
        return True
    kept = jax.tree.leaves(one.get("saved")) + jax.tree.leaves(jax.eval_shape(lambda a: function(**a), one).get("saved"))
    return not kept and size * one["arrays"]["query"].shape[1] <= MAX_TOKENS


def _folded(size: int, args: dict[str, Any]) -> dict[str, Any]:
    """Arguments of `size` calls [size, ...] as those of one."""
    cu_seqlens = args.get("cu_seqlens")
    if cu_seqlens is None:
        return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), args)
    tokens = args["arrays"]["query"].shape[2]
    begins = cu_seqlens + tokens * jnp.arange(size, dtype=cu_seqlens.dtype)[:, None]  # [size, N + 1]
    total = jnp.full(1, size * tokens, cu_seqlens.dtype)

    def fold(path: Any, x: Array) -> Array:
        if _name(path) in PER_SEQUENCE:
            x = jnp.pad(x, [(0, 0), (0, 1), *[(0, 0)] * (x.ndim - 2)])
            return x.reshape(-1, *x.shape[2:])
        return x.reshape(1, -1, *x.shape[3:])

    rest = {name: x for name, x in args.items() if name != "cu_seqlens"}
    return {**jax.tree_util.tree_map_with_path(fold, rest), "cu_seqlens": jnp.concatenate([begins.reshape(-1), total])}


def _unfolded(size: int, args: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    """Results of the one call as those of `size`, whose arguments [size, ...] are given."""
    cu_seqlens = args.get("cu_seqlens")
    if cu_seqlens is None:
        return jax.tree.map(lambda x: x.reshape(size, x.shape[0] // size, *x.shape[1:]), results)

    def unfold(path: Any, x: Array) -> Array:
        if _name(path) in PER_SEQUENCE:
            return x.reshape(size, x.shape[0] // size, *x.shape[1:])[:, :-1]
        x = x.reshape(size, 1, x.shape[1] // size, *x.shape[2:])
        token = jax.lax.broadcasted_iota(cu_seqlens.dtype, x.shape[:3], 2)
        there = token < cu_seqlens[:, None, -1:]  # [size, 1, T]
        return jnp.where(there.reshape(*there.shape, *[1] * (x.ndim - 3)), x, 0)

    return jax.tree_util.tree_map_with_path(unfold, results)


def _name(path: Any) -> str:
    return path[-1].key


def one_by_one(function: Callable[[Any], Any], mapped: Any, args: Any) -> Any:
    leaves, tree = jax.tree.flatten(args)
    flags = jax.tree.leaves(mapped)

    def one(rows: list[Array]) -> Any:
        given = iter(rows)
        return function(jax.tree.unflatten(tree, [next(given) if flag else x for flag, x in zip(flags, leaves, strict=True)]))

    return jax.lax.map(one, [x for flag, x in zip(flags, leaves, strict=True) if flag])
