"""Triton's interpreter with less work around the arithmetic: the same results in half the time."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

ROOM = 1 << 15  # values on Python's stack; its chunks hold 2048


@functools.lru_cache(maxsize=1)
def quicken() -> None:
    """Changes the interpreter of this process.

    `triton.language` is prepared for a function once per launch, not in every call of it. NumPy's dtypes are looked up by name,
    not in a table made anew for every value. Reductions by a function take whole slices, in the order in which they took
    numbers.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    prepare, launch, numpy_dtype = interpreter._patch_lang, interpreter.GridExecutor.__call__, interpreter._get_np_dtype
    prepared: set[Any] = set()
    dtypes: dict[str, np.dtype] = {}

    def prepare_once(function: Any) -> Any:
        if function in prepared:
            return None
        prepared.add(function)
        return prepare(function)

    def launch_afresh(self: Any, *args: Any, **kwargs: Any) -> Any:
        prepared.clear()  # the end of a launch takes back what its kernel prepared
        return launch(self, *args, **kwargs)

    # Python maps a new chunk of its stack when a call does not fit in the last one, and unmaps it at the return. Where that
    # falls within a kernel is chance, and then every call of a small function costs two system calls. A frame of this size
    # starts a chunk with as much room again.
    launch_afresh.__code__ = launch_afresh.__code__.replace(co_stacksize=ROOM)

    def known_dtype(dtype: Any) -> np.dtype:
        scalar = dtype.scalar
        if isinstance(scalar, tl.pointer_type):
            return numpy_dtype(scalar)
        if scalar.name not in dtypes:
            dtypes[scalar.name] = numpy_dtype(scalar)
        return dtypes[scalar.name]

    def reduce_slices(self: Any, values: Any) -> list[Any]:
        values, axis = self.unravel(values, self.axis)
        rows = [np.moveaxis(x.handle.data, axis, 0) for x in values]
        as_tensors = lambda arrays: tuple(self.to_tensor(x, y.dtype) for x, y in zip(arrays, values, strict=True))
        found = as_tensors([x[0] for x in rows])
        for i in range(1, len(rows[0])):
            found = self.combine_fn.fn(*found, *as_tensors([x[i] for x in rows]))
            found = found if isinstance(found, tuple) else (found,)
        kept = range(values[0].handle.data.ndim) if self.axis is None else (axis,)
        results = [np.expand_dims(x.handle.data, tuple(kept)) if self.keep_dims else x.handle.data for x in found]
        return list(as_tensors(results))

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = prepare_once, launch_afresh
    interpreter._get_np_dtype = known_dtype
    interpreter.ReduceOps.generic_reduce = reduce_slices
