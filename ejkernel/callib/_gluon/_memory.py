"""Shared memory of an interpreted Gluon program, in slots that are watched."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ejkernel.callib._gluon._clocks import Slot
from ejkernel.callib._gluon._partitions import Barrier, partition
from ejkernel.callib._gluon._values import Tensor, Type, as_tensor, cast, is_float


class Shared:
    """A part of shared memory: an allocation, a slot of it, or a view."""

    def __init__(self, name: str, array: np.ndarray, slots: Sequence[Slot], *, whole: bool = True):
        self._name, self._array, self._slots, self._whole = name, array, slots, whole
        self.type = Type()

    @classmethod
    def allocate(cls, name: str, shape: Sequence[int], dtype: np.dtype[Any]) -> Shared:
        """Filled with NaN (integers: with what no kernel means): what is read before it is written has to show."""
        array = np.full(shape, np.nan if is_float(dtype) else np.iinfo(dtype).min, dtype)
        return cls(name, array, [Slot(f"{name}[{i}]") for i in range(shape[0])])

    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    @property
    def dtype(self) -> Any:
        return Tensor(self._array[:0]).dtype

    def index(self, i: Any) -> Shared:
        i = int(i)
        if not 0 <= i < len(self._array):
            raise IndexError(f"slot {i} of {self._name}, which has {len(self._array)}.")
        slots = [self._slots[i]] if self._whole else self._slots
        return Shared(f"{self._name}[{i}]", self._array[i], slots, whole=False)

    def slice(self, start: Any, length: Any, dim: int = 0) -> Shared:
        start, length, dim = int(start), int(length), int(dim)
        if not (start >= 0 and length >= 0 and start + length <= self._array.shape[dim]):
            raise IndexError(f"elements {start} to {start + length} of axis {dim} of {self._name}, which has {self.shape}.")
        part = (slice(None),) * dim + (slice(start, start + length),)
        slots = self._slots[start : start + length] if self._whole and dim == 0 else self._slots
        return Shared(self._name, self._array[part], slots, whole=self._whole and dim == 0)

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self._name, self._array.transpose(order), self._slots, whole=False)

    def load(self, layout: Any = None) -> Tensor:
        for slot in self._slots:
            slot.reads(partition())
        partition().scattered = True
        return Tensor(self._array.copy())

    def store(self, value: Any) -> None:
        tile = as_tensor(value).data
        if tile.shape != self.shape:
            raise TypeError(f"{self._name} is {list(self.shape)}; got a tile {list(tile.shape)}.")
        for slot in self._slots:
            slot.writes(partition(), partition())
            slot.unfenced.add(partition().name)
        partition().stored.extend(self._slots)
        partition().scattered = True
        self._array[...] = cast(tile, self._array.dtype)

    def copy_from(self, values: np.ndarray) -> None:
        """An asynchronous copy, which the partition of this thread starts."""
        if values.shape != self.shape:
            raise TypeError(f"{self._name} is {list(self.shape)}; got a copy of {list(values.shape)}.")
        partition().start_copy(self._slots)
        self._array[...] = values

    def operand(self) -> tuple[np.ndarray, Sequence[Slot]]:
        """What a product reads: the values now, and the slots, which must stay as they are until it is done."""
        return self._array, self._slots


class Barriers:
    """Shared memory that holds barriers."""

    def __init__(self, name: str, shape: Sequence[int]):
        self._all = [Barrier(f"{name}[{i}]") for i in range(math.prod(shape))]

    def index(self, i: Any) -> Barrier:
        i = int(i)
        if not 0 <= i < len(self._all):
            raise IndexError(f"barrier {i} of {len(self._all)}.")
        return self._all[i]
