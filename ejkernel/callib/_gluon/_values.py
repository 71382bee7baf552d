"""Values of an interpreted Gluon program: numbers and tiles in numpy arrays, with Triton's rules of types.

Layouts say which thread holds which element. They do not change what is computed, so they are not kept here; that they fit
is what the compiler finds.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import ml_dtypes
import numpy as np
import triton.language as tl

NUMPY = {
    "int1": np.dtype(np.bool_), "int8": np.dtype(np.int8), "int16": np.dtype(np.int16), "int32": np.dtype(np.int32),
    "int64": np.dtype(np.int64), "uint8": np.dtype(np.uint8), "uint16": np.dtype(np.uint16), "uint32": np.dtype(np.uint32),
    "uint64": np.dtype(np.uint64), "fp16": np.dtype(np.float16), "bf16": np.dtype(ml_dtypes.bfloat16),
    "fp32": np.dtype(np.float32), "fp64": np.dtype(np.float64),
}  # fmt: skip
TRITON = {dtype: tl.dtype(name) for name, dtype in NUMPY.items()}


def numpy_dtype(dtype: Any) -> np.dtype[Any]:
    """That of a Triton scalar type."""
    return NUMPY[dtype.name]


class Type:
    """What `value.type` is asked for: a layout to hand on."""

    layout = None


class Tensor:
    """A number or a tile. Nothing changes it: operations in place make new ones."""

    type = Type()
    __array_ufunc__ = None  # so numpy's numbers on the left leave an operation to `__radd__` and the like

    def __init__(self, data: Any, dtype: np.dtype[Any] | None = None):
        self.data = np.asarray(data, dtype)

    @property
    def dtype(self) -> Any:
        return TRITON[self.data.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def to(self, dtype: Any) -> Tensor:
        return Tensor(cast(self.data, numpy_dtype(dtype)))

    def reshape(self, shape: Sequence[Any]) -> Tensor:
        return Tensor(self.data.reshape([int(n) for n in shape]))

    def permute(self, order: Sequence[int]) -> Tensor:
        return Tensor(self.data.transpose(order))

    def __getitem__(self, index: Any) -> Tensor:
        return Tensor(self.data[index])

    def __index__(self) -> int:
        return operator.index(self.data.item())

    def __int__(self) -> int:
        return int(self.data.item())

    def __float__(self) -> float:
        return float(self.data.item())

    def __bool__(self) -> bool:
        if self.data.ndim:
            raise TypeError(f"a branch needs one number; got a tile {list(self.shape)}.")
        return bool(self.data)

    __hash__ = None  # type: ignore[assignment]

    def __neg__(self) -> Tensor:
        return Tensor(-self.data)

    def __invert__(self) -> Tensor:
        return Tensor(~self.data)

    def __repr__(self) -> str:
        return f"Tensor({self.data.dtype.name}{list(self.shape)})" if self.data.ndim else f"Tensor({self.data.item()})"


def cast(data: np.ndarray, dtype: np.dtype[Any]) -> np.ndarray:
    """Numbers converted as a GPU does: to nearest between floats; what is not finite becomes some integer, without a word."""
    with np.errstate(all="ignore"):
        return data.astype(dtype)


def as_tensor(x: Any) -> Tensor:
    """A value of the program; Python's numbers as the types that Triton gives them."""
    if isinstance(x, Tensor):
        return x
    if isinstance(x, bool):
        return Tensor(np.bool_(x))
    if isinstance(x, (int, np.integer)):
        return Tensor(np.int32(x) if -(2**31) <= x < 2**31 else np.int64(x))
    if isinstance(x, (float, np.floating)):
        return Tensor(np.float32(x))
    raise TypeError(f"an interpreted Gluon kernel computes with numbers and tiles; got {x!r}.")


def is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.kind == "f" or dtype == ml_dtypes.bfloat16


def promoted(*values: Any) -> list[np.ndarray]:
    """Arrays of one dtype: floats before integers, then the wider one; Python's numbers take that of the others."""
    arrays = [x.data for x in values if isinstance(x, Tensor)]
    weak = [x for x in values if not isinstance(x, Tensor)]
    found = [x.dtype for x in arrays] or [as_tensor(x).data.dtype for x in weak]
    floats = [dtype for dtype in found if is_float(dtype)]
    if floats:
        dtype = max(floats, key=lambda x: x.itemsize)
        if len({x for x in floats if x.itemsize == 2}) == 2 and dtype.itemsize == 2:  # float16 and bfloat16
            dtype = np.dtype(np.float32)
    elif any(isinstance(x, float) for x in weak):
        dtype = np.dtype(np.float32)
    else:
        dtype = np.result_type(*found)
        if dtype == np.bool_ and any(not isinstance(x, bool) for x in weak):
            dtype = np.dtype(np.int32)
    return [cast(x.data, dtype) if isinstance(x, Tensor) else np.asarray(x).astype(dtype) for x in values]


def _truncated_division(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Towards 0, as a GPU divides integers."""
    return (np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))).astype(a.dtype)


def _remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.fmod(a, b)


def _division(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    if is_float(a.dtype):
        return a / b
    return (a.astype(np.float32) / b.astype(np.float32)).astype(np.float32)


def elementwise(function: Callable[..., Any], *values: Any) -> Tensor:
    """A function of arrays of one dtype, whose result keeps it."""
    arrays = promoted(*values)
    with np.errstate(all="ignore"):
        return Tensor(np.asarray(function(*arrays)))


OPERATORS: dict[str, Callable[..., Any]] = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "truediv": _division, "floordiv": _truncated_division,
    "mod": _remainder, "and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor, "lshift": np.left_shift,
    "rshift": np.right_shift,
}  # fmt: skip
COMPARISONS = {"lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal}


def _operator(function: Callable[..., Any], *, swapped: bool) -> Callable[[Any, Any], Any]:
    def method(self: Tensor, other: Any) -> Any:
        if not isinstance(other, (Tensor, bool, int, float, np.number)):
            return NotImplemented
        return elementwise(function, other, self) if swapped else elementwise(function, self, other)

    return method


for _name, _function in OPERATORS.items():
    setattr(Tensor, f"__{_name}__", _operator(_function, swapped=False))
    setattr(Tensor, f"__r{_name}__", _operator(_function, swapped=True))
for _name, _function in COMPARISONS.items():
    setattr(Tensor, f"__{_name}__", _operator(_function, swapped=False))


class Buffer:
    """An array of the call in host memory, flat."""

    def __init__(self, name: str, array: np.ndarray):
        self.name, self.flat = name, array.reshape(-1)
        assert np.shares_memory(self.flat, array) or not array.size  # what is stored must be seen by the caller


class Pointer:
    """Where elements of a buffer lie: one, or a tile of them."""

    type = Type()

    def __init__(self, buffer: Buffer, offset: Any):
        self.buffer, self.offset = buffer, np.asarray(offset, np.int64)

    @property
    def dtype(self) -> Any:
        return tl.pointer_type(TRITON[self.buffer.flat.dtype])

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.buffer, self.offset + as_tensor(other).data.astype(np.int64))

    __radd__ = __add__

    def __sub__(self, other: Any) -> Pointer:
        return Pointer(self.buffer, self.offset - as_tensor(other).data.astype(np.int64))

    def __getitem__(self, index: Any) -> Pointer:
        return Pointer(self.buffer, self.offset[index])

    def places(self, mask: Any, what: str) -> tuple[np.ndarray, np.ndarray]:
        """(offsets, which of them count), of one shape.

        Raises:
            IndexError: one that counts lies outside of the array.
        """
        asked = np.bool_(True) if mask is None else as_tensor(mask).data
        offset, asked = np.broadcast_arrays(self.offset, asked)
        outside = asked & ((offset < 0) | (offset >= self.buffer.flat.size))
        if outside.any():
            wrong = int(offset[outside].reshape(-1)[0])
            raise IndexError(f"{what} element {wrong} of {self.buffer.name!r}, which has {self.buffer.flat.size}.")
        return offset, asked

    def load(self, mask: Any = None, other: Any = None) -> np.ndarray:
        """Elements; where the mask is not set `other`, or 0."""
        offset, asked = self.places(mask, "reads")
        flat = self.buffer.flat
        if asked.all():
            return flat[offset]
        rest = np.zeros((), flat.dtype) if other is None else cast(as_tensor(other).data, flat.dtype)
        return np.where(asked, flat[np.where(asked, offset, 0)] if flat.size else rest, rest)

    def store(self, value: Any, mask: Any = None) -> None:
        offset, asked = self.places(mask, "writes")
        values = np.broadcast_to(cast(as_tensor(value).data, self.buffer.flat.dtype), offset.shape)
        self.buffer.flat[offset[asked]] = values[asked]
