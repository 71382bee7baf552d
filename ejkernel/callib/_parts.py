"""Interpreted kernels in what each device computes of a call that XLA's partitioner splits.

JAX lowers those computations to programs of their own, whose callbacks to Python are lost: the compiled program has only those
of the whole program. So the whole program gets one callback for all kernels of a split call, and each kernel says its number.
"""

from __future__ import annotations

import contextvars
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir


class HostCallbacks:
    """The interpreted kernels of one split call. Compiled kernels need none of this."""

    def __init__(self) -> None:
        self.functions: list[Callable[..., Any]] = []
        self.place: int | None = None  # of `call` among the program's callbacks

    def call(self, number: Any, *arrays: Any) -> Any:
        return self.functions[int(number)](*arrays)

    def bound(self, leaves: Sequence[Any]) -> list[Any]:
        """The arrays, of which the program that computes with them knows this callback."""
        return _callback_p.bind(*leaves, parts=self)

    def within(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, whose interpreted kernels are called by this callback."""

        def run(*args: Any) -> Any:
            token = within_parts.set(self)
            try:
                return function(*args)
            finally:
                within_parts.reset(token)

        return run

    def lower(self, ctx: Any, operands: Sequence[Any], on_host: Callable[..., Any]) -> Any:
        """One kernel in a device's part."""
        number = np.int32(len(self.functions))
        self.functions.append(on_host)
        typed = dataclasses.replace(ctx, avals_in=[jax.core.ShapedArray((), np.int32), *ctx.avals_in])
        call = jax.ffi.ffi_lowering("xla_ffi_python_cpu_callback", has_side_effect=False)
        return call(typed, mlir.ir_constant(number), *operands, index=np.uint64(self.place or 0))


within_parts: contextvars.ContextVar[HostCallbacks | None] = contextvars.ContextVar("ejkernel_parts", default=None)

_callback_p = Primitive("callback_of_parts")
_callback_p.multiple_results = True
_callback_p.def_impl(lambda *arrays, parts: list(arrays))
_callback_p.def_abstract_eval(lambda *arrays, parts: list(arrays))


def _lower(ctx: Any, *operands: Any, parts: HostCallbacks) -> list[Any]:
    if tuple(ctx.module_context.platforms) == ("cpu",):  # where kernels are interpreted
        ctx.module_context.add_host_callback(parts.call)
        parts.place = len(ctx.module_context.host_callbacks) - 1
    return list(operands)


mlir.register_lowering(_callback_p, _lower)
batching.primitive_batchers[_callback_p] = lambda args, axes, **params: (_callback_p.bind(*args, **params), axes)
