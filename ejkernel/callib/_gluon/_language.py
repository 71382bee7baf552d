"""The words of Gluon that kernels here are written in, on numpy arrays.

What is missing is an error that names it; a word is added here with what it does to shared memory and to the order of things.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from triton.language import PropagateNan

from ejkernel.callib._gluon._memory import Barriers, Shared
from ejkernel.callib._gluon._partitions import Barrier, Product, partition, place, run_partitions, wait_for
from ejkernel.callib._gluon._values import NUMPY, TRITON, Pointer, Tensor, as_tensor, cast, elementwise, numpy_dtype, promoted


class MissingWordError(NotImplementedError, AttributeError):
    """A kernel uses what the interpreter does not know."""


class Layout:
    """Any layout: they do not change what is computed."""

    def __init__(self, *_: Any, **__: Any):
        pass

    @staticmethod
    def get_default_for(*_: Any, **__: Any) -> Layout:
        return Layout()


class BarrierLayout(Layout):
    """That of barriers, which says that an allocation holds some."""


class Words:
    """A module of Gluon."""

    def __init__(self, name: str, words: dict[str, Any]):
        self._name = name
        self.__dict__.update(words)

    def __getattr__(self, word: str) -> Any:
        if word.endswith("Layout"):
            return Layout
        raise MissingWordError(f"the interpreter of Gluon kernels does not know {self._name}.{word}.")

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise MissingWordError(f"the interpreter of Gluon kernels does not know {self._name}.")


# Numbers and tiles


def arange(start: Any, end: Any, layout: Any = None) -> Tensor:
    return Tensor(np.arange(int(start), int(end), dtype=np.int32))


def full(shape: Sequence[Any], value: Any, dtype: Any, layout: Any = None) -> Tensor:
    return Tensor(np.full([int(n) for n in shape], cast(as_tensor(value).data, numpy_dtype(dtype))))


def zeros(shape: Sequence[Any], dtype: Any, layout: Any = None) -> Tensor:
    return full(shape, 0, dtype)


def zeros_like(x: Tensor, *_: Any, **__: Any) -> Tensor:
    return Tensor(np.zeros_like(x.data))


def to_type(x: Any, dtype: Any) -> Tensor:
    return as_tensor(x).to(dtype)


def where(condition: Any, a: Any, b: Any) -> Tensor:
    a, b = promoted(a, b)
    return Tensor(np.where(as_tensor(condition).data, a, b))


def convert_layout(x: Tensor, layout: Any, assert_trivial: bool = False) -> Tensor:
    return Tensor(x.data)


def split(x: Tensor) -> tuple[Tensor, Tensor]:
    return Tensor(x.data[..., 0]), Tensor(x.data[..., 1])


def _of_one(function: Callable[..., Any]) -> Callable[[Any], Tensor]:
    return lambda x: elementwise(function, x)


def _of_two(function: Callable[..., Any]) -> Callable[[Any, Any], Tensor]:
    return lambda a, b: elementwise(function, a, b)


def maximum(a: Any, b: Any, propagate_nan: Any = None) -> Tensor:
    return elementwise(np.maximum if propagate_nan == PropagateNan.ALL else np.fmax, a, b)


def _reduction(function: Callable[..., Any]) -> Callable[..., Tensor]:
    def reduce(x: Tensor, axis: int | None = None, keep_dims: bool = False) -> Tensor:
        with np.errstate(all="ignore"):
            found = np.asarray(function(x.data, axis=axis, keepdims=keep_dims))
        return Tensor(found.astype(np.int32 if x.data.dtype == np.bool_ else x.data.dtype))

    return reduce


def associative_scan(x: Any, axis: int, combine: Callable[..., Any], reverse: bool = False) -> Any:
    """Row by row in the order of the axis: the combination need not be associative to the last bit."""
    tiles = x if isinstance(x, tuple) else (x,)
    rows = [np.moveaxis(tile.data, axis, 0) for tile in tiles]
    rows = [row[::-1] if reverse else row for row in rows]
    found = [np.empty_like(row) for row in rows]
    so_far = tuple(Tensor(row[0]) for row in rows)
    for i in range(len(rows[0])):
        if i > 0:
            so_far = combine(*so_far, *(Tensor(row[i]) for row in rows))
            so_far = so_far if isinstance(so_far, tuple) else (so_far,)
        for out, value in zip(found, so_far, strict=True):
            out[i] = value.data
    results = tuple(Tensor(np.moveaxis(out[::-1] if reverse else out, 0, axis)) for out in found)
    return results if isinstance(x, tuple) else results[0]


def counted(*bounds: Any) -> Iterator[Tensor]:
    """`range`, whose numbers are values of the program."""
    return (Tensor(np.int32(i)) for i in range(*(int(x) for x in bounds)))


def static_range(*bounds: Any) -> range:
    return range(*(int(x) for x in bounds))


# Programs and memory


def program_id(axis: int) -> Tensor:
    return Tensor(np.int32(place()[0][int(axis)]))


def num_programs(axis: int) -> Tensor:
    return Tensor(np.int32(place()[1][int(axis)]))


def load(pointer: Pointer, mask: Any = None, other: Any = None) -> Tensor:
    return Tensor(pointer.load(mask, other))


def store(pointer: Pointer, value: Any, mask: Any = None) -> None:
    pointer.store(value, mask)


def allocate_shared_memory(dtype: Any, shape: Sequence[Any], layout: Any, value: Any = None) -> Any:
    sizes = [int(n) for n in shape]
    if isinstance(layout, BarrierLayout):
        return Barriers("a barrier", sizes)
    memory = Shared.allocate(f"{numpy_dtype(dtype).name}{sizes}", sizes, numpy_dtype(dtype))
    if value is not None:
        memory.store(value)
    return memory


def copy_async(memory: Shared, pointer: Pointer, mask: Any = None) -> None:
    memory.copy_from(pointer.load(mask, 0))


def arrive_after_copies(barrier: Barrier, increment_count: bool = True) -> None:
    if increment_count:
        raise MissingWordError("the interpreter of Gluon kernels knows async_copy.mbarrier_arrive with increment_count=False.")
    partition().arrive_after_copies(barrier)


# Partitions, barriers, products


def warp_specialize(parts: Sequence[tuple[Callable[..., Any], Sequence[Any]]], warps: Sequence[int], registers: Any) -> None:
    """The first part is run by the warps that the kernel was started with."""
    names = [f"partition {i} ({function.__name__})" for i, (function, _) in enumerate(parts)]
    run_partitions(
        [lambda function=function, arguments=arguments: function(*arguments) for function, arguments in parts],  # type: ignore[misc]
        names,
        [partition().warps, *(int(n) for n in warps)],
    )


def barrier_of_partition() -> None:
    partition().meet()


def fence_async_shared(*_: Any, **__: Any) -> None:
    partition().fence()


def init_barrier(barrier: Barrier, count: Any) -> None:
    barrier.init(count)


def wait_barrier(barrier: Barrier, phase: Any) -> None:
    wait_for(barrier, int(phase))


def arrive_barrier(barrier: Barrier, *, count: Any = 1) -> None:
    partition().arrive(barrier, int(count))


def warpgroup_mma(a: Any, b: Shared, acc: Any, *, use_acc: Any = True, is_async: bool = False) -> Any:
    """a b + acc: a is a tile of registers or in shared memory, b in shared memory; products in float32."""
    left, slots = a.operand() if isinstance(a, Shared) else (a.data, [])
    right, others = b.operand()
    start = acc.result() if isinstance(acc, Product) else acc
    with np.errstate(all="ignore"):
        found = left.astype(np.float32) @ right.astype(np.float32)
        found = found + start.data if bool(use_acc) else found
    product = partition().start_product(found, [*slots, *others])
    if is_async:
        return product
    partition().wait_for_products(0)
    return product.result()


def mma_v2(a: Tensor, b: Tensor, acc: Tensor, input_precision: str | None = None) -> Tensor:
    """a b + acc of tiles in registers: float32's as tf32, whose missing bits tensor cores cut off, else products in float32."""
    operands = [x.data for x in (a, b)]
    if operands[0].dtype == np.float32:
        if input_precision not in (None, "tf32"):
            raise MissingWordError(
                f"the interpreter of Gluon kernels does not know mma_v2 with input_precision={input_precision!r}."
            )
        operands = [(np.ascontiguousarray(x).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32) for x in operands]
    with np.errstate(all="ignore"):
        left, right = (x.astype(np.float32) for x in operands)
        return Tensor(acc.data + left @ right)


def warpgroup_mma_wait(num_outstanding: Any = 0, deps: Sequence[Any] | None = None) -> Any:
    if deps is None:
        raise TypeError("warpgroup_mma_wait needs deps: the results that are there when it returns.")
    partition().wait_for_products(int(num_outstanding))
    found = tuple(partition().finished(x) if isinstance(x, Product) else x for x in deps)
    return found if len(found) > 1 else found[0]


_TYPES = {dtype.name: dtype for dtype in TRITON.values()}
GL = Words("gl", {
    "float32": _TYPES["fp32"], "float16": _TYPES["fp16"], "bfloat16": _TYPES["bf16"], "float64": _TYPES["fp64"],
    **{name: _TYPES[name] for name in NUMPY if "int" in name},
    "constexpr": lambda x: x, "static_range": static_range, "arange": arange, "full": full, "zeros": zeros,
    "zeros_like": zeros_like, "cast": to_type, "where": where, "convert_layout": convert_layout, "split": split,
    "reshape": lambda x, shape: x.reshape(shape), "permute": lambda x, order: x.permute(order),
    "exp": _of_one(np.exp), "exp2": _of_one(np.exp2), "log": _of_one(np.log), "log2": _of_one(np.log2),
    "abs": _of_one(np.abs), "sqrt": _of_one(np.sqrt), "maximum": maximum, "minimum": _of_two(np.fmin),
    "PropagateNan": PropagateNan,
    "sum": _reduction(np.sum), "max": _reduction(np.fmax.reduce), "min": _reduction(np.fmin.reduce),
    "associative_scan": associative_scan, "program_id": program_id, "num_programs": num_programs, "load": load, "store": store,
    "allocate_shared_memory": allocate_shared_memory, "warp_specialize": warp_specialize,
    "thread_barrier": barrier_of_partition, "barrier": barrier_of_partition,
})  # fmt: skip
MBARRIER = Words("mbarrier", {
    "MBarrierLayout": BarrierLayout, "init": init_barrier, "wait": wait_barrier, "arrive": arrive_barrier,
})  # fmt: skip
ASYNC_COPY = Words("async_copy", {
    "async_copy_global_to_shared": copy_async, "async_load": copy_async, "mbarrier_arrive": arrive_after_copies,
    "commit_group": lambda: partition().commit_copies(), "wait_group": lambda n=0: partition().wait_for_copies(int(n)),
})  # fmt: skip
FUNCTIONS = {
    "mma_v2": mma_v2, "warpgroup_mma": warpgroup_mma, "warpgroup_mma_wait": warpgroup_mma_wait,
    "fence_async_shared": fence_async_shared,
    **{name: getattr(GL, name) for name in ("barrier", "thread_barrier", "warp_specialize")},
    **{name: getattr(ASYNC_COPY, name) for name in ("async_copy_global_to_shared", "async_load")},
}  # fmt: skip
