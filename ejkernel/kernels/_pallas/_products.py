"""Products on the matrix unit, and sums of log decays written as products with zeros and ones."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = jax.Array
LEAST_LOG = -1e4  # exp of it is 0, and so is that of -inf, which would be NaN times the zeros of a product


class Products(NamedTuple):
    """Matrix products summed in float32; `narrow`: operands are rounded to bfloat16 by hand, as the matrix unit rounds them."""

    narrow: bool

    def _dot(self, x: Array, y: Array, of_x: int, of_y: int) -> Array:
        if self.narrow:
            x, y = x.astype(jnp.bfloat16), y.astype(jnp.bfloat16)
        return _product(x, y, of_x, of_y, None if self.narrow else lax.Precision.HIGHEST)

    def nn(self, x: Array, y: Array) -> Array:
        """x y."""
        return self._dot(x, y, 1, 0)

    def nt(self, x: Array, y: Array) -> Array:
        """x y^T."""
        return self._dot(x, y, 1, 1)

    def tn(self, x: Array, y: Array) -> Array:
        """x^T y."""
        return self._dot(x, y, 0, 0)

    @property
    def parts(self) -> int:
        """Parts of a number in sums: all 24 bits of a float32; 16 where operands have 8 anyway."""
        return 2 if self.narrow else 3

    def sums(self, which: Array, x: Array, transposed: bool = False) -> Array:
        """`which @ x`, or `which^T @ x`, of zeros and ones with numbers of any size, as exact as a sum of `x` by parts."""
        ones = which.astype(jnp.bfloat16)
        return _dots([(ones, part) for part in parts_of(x, self.parts)], 0 if transposed else 1, 0)

    def spread_sums(self, x: Array, columns: int) -> Array:
        """`[C, D]` to `[D, columns]`: the sums of its columns, side by side in every column."""
        ones = jnp.ones((x.shape[0], columns), jnp.bfloat16)
        return _dots([(part, ones) for part in parts_of(x, self.parts)], 0, 0)

    def row_sums_in_a_row(self, x: Array) -> Array:
        """`[D, E]` to `[1, D]`: the sums of its rows, side by side."""
        ones = jnp.ones((16, x.shape[1]), jnp.bfloat16)  # one row would do; 16 are the smallest tile
        return _dots([(ones, part) for part in parts_of(x, self.parts)], 1, 1)[:1]


def parts_of(x: Array, count: int) -> list[Array]:
    """An array as `count` parts in bfloat16 whose sum it is, to 8 bits each; bfloat16 is one part.

    Bits are cut off, not rounded: a compiler may take rounding to bfloat16 and back for nothing at all.
    """
    if x.dtype == jnp.bfloat16:
        return [x]
    parts = []
    for _ in range(count):
        high = lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.uint32) & np.uint32(0xFFFF0000), jnp.float32)
        parts.append(high.astype(jnp.bfloat16))
        x = x - high
    return parts


def _dots(pairs: list[tuple[Array, Array]], of_x: int, of_y: int) -> Array:
    return functools.reduce(jnp.add, [_product(x, y, of_x, of_y) for x, y in pairs])


def _product(x: Array, y: Array, of_x: int, of_y: int, precision: lax.Precision | None = None) -> Array:
    """The sum in float32 over axis `of_x` of x and `of_y` of y."""
    if of_x == of_y == 1 and y.shape[0] == 1:  # a single key channel: with one row of bfloat16 JAX's lowering fails
        return row_sums(x.astype(jnp.float32) * y.astype(jnp.float32))
    dims = (((of_x,), (of_y,)), ((), ()))
    return lax.dot_general(x, y, dims, precision=precision, preferred_element_type=jnp.float32)


def positions(rows: int, columns: int) -> tuple[Array, Array]:
    """The row and the column of every entry of `[rows, columns]`."""
    return tuple(lax.broadcasted_iota(jnp.int32, (rows, columns), axis) for axis in (0, 1))  # type: ignore[return-value]


def row_sums(x: Array) -> Array:
    """`[C, D]` to `[C, 1]`."""
    return jnp.sum(x, axis=1, keepdims=True)


def column_sums(x: Array) -> Array:
    """`[C, D]` to `[1, D]`."""
    return jnp.sum(x, axis=0, keepdims=True)
