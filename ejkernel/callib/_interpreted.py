"""Triton kernels interpreted on host memory, without a GPU and without torch: for tests of the mathematics.

Triton's interpreter asks its array arguments for a handful of methods that `HostArray` has over numpy memory; loads and
stores then go straight to that memory. It runs one program after another, so it proves sums and indices, not the absence
of races.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from ejkernel.callib._compiled import _DTYPES
from ejkernel.callib._decorated import is_gluon
from ejkernel.callib._parts import HostCallbacks, within_parts

# The interpreter replaces parts of triton.language while a kernel runs; several devices, or calls in flight, must take turns.
_one_at_a_time = threading.Lock()


class HostArray:
    """What Triton's interpreter needs of an array."""

    def __init__(self, array: np.ndarray | None):
        self.array = array
        self.dtype = None if array is None else _DTYPES[array.dtype.name]

    def data_ptr(self) -> int:
        assert self.array is not None
        return self.array.ctypes.data

    def untyped_storage(self) -> HostArray:
        return self

    def cpu(self) -> HostArray:
        return self

    def copy_(self, other: HostArray) -> None:
        """The interpreter's copy back to the device: host memory is the device here."""

    def new_empty(self, *_: Any, device: Any = None) -> HostArray:
        return HostArray(None)

    def set_(self, storage: HostArray, offset: int, size: Any, stride: Any) -> None:
        self.array, self.dtype = storage.array, storage.dtype

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        assert self.array is not None
        return self.array.shape

    def stride(self) -> tuple[int, ...]:
        assert self.array is not None
        return tuple(s // self.array.itemsize for s in self.array.strides)


def run(
    kernel: Any,
    names: Sequence[str],
    args: Sequence[Any],
    outputs: Sequence[jax.ShapeDtypeStruct],
    grid: tuple[int, int, int],
    constants: dict[str, Any],
    aliases: dict[int, int],
    zeroed: frozenset[int],
    warps: int,
) -> list[jax.Array]:
    interpret = functools.partial(_interpret_gluon, warps=warps) if is_gluon(kernel) else _interpret
    source = {o: i for i, o in aliases.items()}
    is_array = [isinstance(x, jax.Array) for x in args]
    numbers = [None if array else x for array, x in zip(is_array, args, strict=True)]  # the function must hold no tracers

    def on_host(*concrete: np.ndarray) -> tuple[np.ndarray, ...]:
        arrays = iter(concrete)
        values = [np.array(next(arrays)) if array else x for array, x in zip(is_array, numbers, strict=True)]
        results = [_buffer(x, values[source[i]] if i in source else None, i in zeroed) for i, x in enumerate(outputs)]
        with _one_at_a_time:
            interpret(kernel, grid, dict(zip(names, [*values, *results], strict=True)), constants)
        return tuple(results)

    arrays = [x for x in args if isinstance(x, jax.Array)]
    types = tuple((x.shape, x.dtype) for x in outputs)
    return _on_host_p.bind(*arrays, on_host=on_host, outputs=types, parts=within_parts.get())


def _interpret(kernel: Any, grid: tuple[int, int, int], arguments: dict[str, Any], constants: dict[str, Any]) -> None:
    """One launch of a Triton kernel."""
    _mend_bfloat16()
    hosts = {name: HostArray(x) if isinstance(x, np.ndarray) else x for name, x in arguments.items()}
    given = {**hosts, **constants}
    kernel[grid](*[given[name] for name in inspect.signature(kernel.fn).parameters])


def _interpret_gluon(
    kernel: Any, grid: tuple[int, int, int], arguments: dict[str, Any], constants: dict[str, Any], *, warps: int
) -> None:
    """One launch of a Gluon kernel."""
    from ejkernel.callib._gluon import launch

    launch(kernel, grid, arguments, constants, warps)


# A callback of our own that hands over numpy memory. `jax.pure_callback` makes JAX arrays of it first, and until jax 0.12 it
# copies those of 100 KB and more on the very threads that run the computation: where they all wait in callbacks, nothing
# goes on.
_on_host_p = Primitive("interpreted_triton_kernel")
_on_host_p.multiple_results = True
OutputTypes = tuple[tuple[tuple[int, ...], Any], ...]


@_on_host_p.def_impl
def _eager(*arrays: Any, **params: Any) -> list[jax.Array]:
    with jax.disable_jit(False):  # compiled even where nothing else is: the callback has no other way to run
        return jax.jit(functools.partial(_on_host_p.bind, **params))(*arrays)


@_on_host_p.def_abstract_eval
def _types(*_: Any, on_host: Callable[..., Any], outputs: OutputTypes, parts: HostCallbacks | None) -> list[Any]:
    return [jax.core.ShapedArray(shape, dtype) for shape, dtype in outputs]


def _lower(ctx: Any, *operands: Any, on_host: Callable[..., Any], outputs: OutputTypes, parts: HostCallbacks | None) -> Any:
    if parts is not None:
        return parts.lower(ctx, operands, on_host)
    results, _, _ = mlir.emit_python_callback(
        ctx, on_host, None, list(operands), ctx.avals_in, ctx.avals_out, has_side_effect=False, returns_token=False
    )
    return results


def _one_by_one(arrays: Sequence[Any], axes: Sequence[int | None], **params: Any) -> tuple[list[jax.Array], list[int]]:
    """vmap: one call after another."""
    mapped = [None if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(arrays, axes, strict=True)]
    each = lambda row: _on_host_p.bind(*(x if y is None else y for x, y in zip(arrays, row, strict=True)), **params)
    results = jax.lax.map(each, mapped)
    return results, [0] * len(results)


mlir.register_lowering(_on_host_p, _lower)
batching.primitive_batchers[_on_host_p] = _one_by_one


def _buffer(out: jax.ShapeDtypeStruct, aliased: np.ndarray | None, zero: bool) -> np.ndarray:
    if aliased is not None:
        return aliased
    poison = np.nan if jnp.issubdtype(out.dtype, jnp.floating) else 0  # an element left unwritten must show in a test
    return np.full(out.shape, 0 if zero else poison, out.dtype)


@functools.lru_cache(maxsize=1)
def _mend_bfloat16() -> None:
    """Rounds to bfloat16 as a GPU does, and widens operands of `tl.dot`: as it comes, the interpreter cuts digits off and
    multiplies bit patterns, and says nothing."""
    import triton.language as tl
    from triton.runtime import interpreter

    convert_float, create_dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def convert(x: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
        if (source, target) == (tl.float32, tl.bfloat16):
            return np.asarray(x, np.float32).astype(jnp.bfloat16).view(np.uint16)
        return convert_float(x, source, target, rounding)

    def dot(self: Any, a: Any, b: Any, *rest: Any) -> Any:
        wide = [self.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)]
        return create_dot(self, *wide, *rest)

    interpreter._convert_float, interpreter.InterpreterBuilder.create_dot = convert, dot
