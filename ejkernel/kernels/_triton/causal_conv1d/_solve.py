"""The short causal convolution by Triton kernels, under every JAX transformation.

Reverse mode runs kernels both ways. Forward mode and the gradient of a gradient differentiate XLA's form (`_transposable`).
`vmap` over the inputs makes one call of a larger batch; over weights or packed rows, calls run one after another. The kernels
know no initial state: the first W - 1 tokens of a sequence, which see it, are XLA's.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import SymbolicZero

from ejkernel._varying import alike
from ejkernel.kernels._linear.batching import one_by_one
from ejkernel.kernels._triton.causal_conv1d._launches import forward, gradients
from ejkernel.kernels._xla import causal_conv1d as xla
from ejkernel.kernels._xla._transposable import call, linear_map

Array = jax.Array
Arrays = dict[str, Array]
OF_TOKENS = ("x", "dy")  # arrays with a row for each token of the batch


def activated(activation: str | None, arrays: Arrays, offsets: Array | None) -> Array:
    """y `[B, T, C]` of x, weight and those of bias and state that are given."""
    given = alike(arrays if offsets is None else {**arrays, "offsets": offsets})
    state, offsets = given.pop("state", None), given.pop("offsets", None)
    if state is None or given["weight"].shape[0] == 1:
        return _convolved(activation, given, offsets)
    # Two parts of the tokens have their own part of the gradient of weight and bias: these are added before they are rounded.
    given = {name: x if name == "x" else x.astype(jnp.float32) for name, x in given.items()}
    return _from_state(activation, given, state, offsets, _convolved(activation, given, offsets))


def _from_state(activation: str | None, arrays: Arrays, state: Array, offsets: Array | None, y: Array) -> Array:
    """y with the first W - 1 tokens of each sequence, or fewer, computed from its state."""
    x, (N, kept) = arrays["x"], state.shape[:2]
    if offsets is None:
        first = xla.activated(activation, {**arrays, "x": x[:, :kept], "state": state}, None)
        return jax.lax.dynamic_update_slice(y, first, (0, 0, 0))
    token = offsets[:-1, None] + jnp.arange(kept, dtype=offsets.dtype)[None]  # [N, W - 1]
    own = token < offsets[1:, None]
    nowhere = x.shape[1] + jnp.arange(N * kept, dtype=offsets.dtype).reshape(N, kept)  # distinct, and dropped
    token = jnp.where(own, token, nowhere)
    seen = jnp.where(own[..., None], x[0].at[token].get(mode="fill", fill_value=0), 0)  # [N, W - 1, C]
    state = jnp.where(own[:, :1, None], state, 0)  # of an empty sequence it says nothing about y, whatever it holds
    first = xla.activated(activation, {**arrays, "x": seen, "state": state}, None)
    return y.at[0, token].set(first, mode="drop", unique_indices=True)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _convolved(activation: str | None, arrays: Arrays, offsets: Array | None) -> Array:
    # A scan's gradient forgets the rule below, and keeps what this calls.
    return call(_Forward(activation, tuple(arrays), offsets is not None), *_flat(arrays, offsets))[0]


@functools.partial(_convolved.defjvp, symbolic_zeros=True)
def _convolved_jvp(activation: str | None, primals: Any, tangents: Any) -> Any:
    arrays, offsets = primals
    y = _convolved(activation, arrays, offsets)
    moving = {name: t for name, t in tangents[0].items() if not isinstance(t, SymbolicZero)}
    if not moving:
        return y, jnp.zeros_like(y)
    derivative = _Derivative(activation, tuple(arrays), tuple(moving), offsets is not None)
    transpose = dataclasses.replace(derivative, transposed=True)
    return y, linear_map(derivative, transpose, _flat(arrays, offsets), list(moving.values()))[0]


@dataclasses.dataclass(frozen=True)
class _Forward:
    """`_convolved` over flat arguments, `(*arrays, offsets?) -> y`."""

    activation: str | None
    names: tuple[str, ...]
    packed: bool
    by_xla: bool = False

    def plain(self) -> _Forward:
        return dataclasses.replace(self, by_xla=True)

    def varies(self, mapped: Sequence[bool]) -> tuple[bool, ...]:
        return (any(mapped),)

    def __call__(self, *flat: Array) -> list[Array]:
        arrays = dict(zip(self.names, flat, strict=False))
        offsets = flat[-1] if self.packed else None
        if self.by_xla:
            return [xla.activated(self.activation, arrays, offsets)]
        return [_mapped(functools.partial(forward, self.activation), _args(arrays, offsets))["y"]]


@dataclasses.dataclass(frozen=True)
class _Derivative:
    """The derivative of `_convolved` in the `moving` arrays, or its transpose, over flat arguments.

    `(*arrays, offsets?, *tangents of moving) -> dy`, transposed `(*arrays, offsets?, dy) -> cotangents of moving`.
    """

    activation: str | None
    names: tuple[str, ...]
    moving: tuple[str, ...]
    packed: bool
    transposed: bool = False
    by_xla: bool = False

    def plain(self) -> _Derivative:
        return dataclasses.replace(self, by_xla=True)

    def varies(self, mapped: Sequence[bool]) -> tuple[bool, ...]:
        return (any(mapped),) * (len(self.moving) if self.transposed else 1)

    def __call__(self, *flat: Array) -> list[Array]:
        count = len(self.names)
        arrays = dict(zip(self.names, flat[:count], strict=True))
        offsets, rest = flat[count] if self.packed else None, flat[count + self.packed :]
        if self.transposed and not self.by_xla:
            found = _gradients(self.activation, arrays, offsets, *rest)
            return [found[name] for name in self.moving]
        some = {name: arrays[name] for name in self.moving}
        run = lambda some: xla.activated(self.activation, {**arrays, **some}, offsets)
        if self.transposed:
            found = jax.vjp(run, some)[1](*rest)[0]
            return [found[name] for name in self.moving]
        return [jax.jvp(run, (some,), (dict(zip(self.moving, rest, strict=True)),))[1]]


def _gradients(activation: str | None, arrays: Arrays, offsets: Array | None, dy: Array) -> Arrays:
    """Of every array, in its dtype. Tiles have sums of their own, which are added up in one order."""
    found = _mapped(functools.partial(gradients, activation), {**_args(arrays, offsets), "dy": dy})
    whole = {name: found[f"d{name}"] for name in arrays}
    return {name: x if name == "x" else jnp.sum(x, (0, 1)).astype(arrays[name].dtype) for name, x in whole.items()}


def _flat(arrays: Arrays, offsets: Array | None) -> list[Array]:
    return [*arrays.values(), *([] if offsets is None else [offsets])]


def _args(arrays: Arrays, offsets: Array | None) -> Arrays:
    return arrays if offsets is None else {**arrays, "offsets": offsets}


def _mapped(launch: Callable[[Arrays], Arrays], args: Arrays) -> Arrays:
    """`launch(args)`; `vmap` makes one larger call where it can."""
    call_once = custom_vmap(launch)

    @call_once.def_vmap
    def of_many(size: int, flags: Any, args: Arrays) -> tuple[Arrays, dict[str, bool]]:
        (mapped,) = flags
        again = lambda args: _mapped(launch, args)
        rows = [name for name in args if name in OF_TOKENS]
        if size > 0 and "offsets" not in args and not any(flag for name, flag in mapped.items() if name not in rows):
            wide = {n: args[n] if mapped[n] else jnp.broadcast_to(args[n], (size, *args[n].shape)) for n in rows}
            found = again({**args, **{name: x.reshape(-1, *x.shape[2:]) for name, x in wide.items()}})
            found = {name: x.reshape(size, -1, *x.shape[1:]) for name, x in found.items()}
        else:
            found = one_by_one(again, mapped, args)
        return found, dict.fromkeys(found, True)

    return call_once(args)
