"""Systems (I + L) E = R with a strictly lower triangular L [C, C].

The inverse grows along the dyadic tree, X_2h = [[X_1, 0], [-X_2 L_21 X_1, X_2]]: a level is X - X L' X, L' being L where rows
lie in right and columns in left halves of blocks of 2h rows. No power of L is ever formed, so keys that point the same way do
no harm. What the inverse leaves of R is taken once more, since products of float32 round.

The levels depend on each other, and a product of 64 rows leaves most of the matrix unit idle. So the systems of several heads
are the diagonal blocks of one matrix as wide as the unit, and all of these go through the levels together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp

from ejkernel.kernels._pallas._chips import LANES
from ejkernel.kernels._pallas._products import Array, Products, parts_of, positions
from ejkernel.kernels._pallas.linear.kernels.tree import meeting, steps


class UnitLower(NamedTuple):
    """I + L, ready to solve."""

    mm: Products  # of what meets the inverse
    L: Array  # [C, C]
    inverse: Array  # [C, C]

    @classmethod
    def of_each(cls, mm: Products, systems: Sequence[Array]) -> list[UnitLower]:
        """Of every L `[C, C]`."""
        C = systems[0].shape[0]
        many = max(1, LANES // C)
        groups = [systems[i : i + many] for i in range(0, len(systems), many)]
        together = [_diagonal(group) for group in groups]
        found = []
        for L in together:
            t, s = positions(*L.shape)
            found.append(jnp.where(t == s, 1.0, jnp.where(meeting(1, L.shape[0]), -L, 0.0)))
        for h in steps(2, C):
            # Both products are 0 where no rows meet, unless a head holds NaN or inf: times the zeros between the blocks that
            # is NaN, and must not reach the other heads.
            meet = lambda x, h=h: jnp.where(meeting(h, x.shape[0]), x, 0.0)
            halfway = [meet(_product(mm, X, meet(L))) for X, L in zip(found, together, strict=True)]
            found = [X - meet(_product(mm, half, X)) for X, half in zip(found, halfway, strict=True)]
        blocks = [X[i : i + C, i : i + C] for X in found for i in range(0, X.shape[0], C)]
        return [cls(mm, L, X) for L, X in zip(systems, blocks, strict=True)]

    def solve(self, R: Array) -> Array:
        """E `[C, V]` with (I + L) E = R."""
        E = self.mm.nn(self.inverse, R)
        if self.mm.narrow:
            return E
        return E + self.mm.nn(self.inverse, R - E - self.mm.nn(self.L, E))

    def solve_transposed(self, Y: Array) -> Array:
        """R `[C, V]` with (I + L)^T R = Y."""
        R = self.mm.tn(self.inverse, Y)
        if self.mm.narrow:
            return R
        return R + self.mm.tn(self.inverse, Y - R - self.mm.tn(self.L, R))


def _diagonal(blocks: Sequence[Array]) -> Array:
    """The matrix with these diagonal blocks."""
    if len(blocks) == 1:
        return blocks[0]
    zero = jnp.zeros_like(blocks[0])
    rows = [[block if i == j else zero for j in range(len(blocks))] for i, block in enumerate(blocks)]
    return jnp.concatenate([jnp.concatenate(row, 1) for row in rows], 0)


def _product(mm: Products, x: Array, y: Array) -> Array:
    """x y to 16 bits where operands have 8 anyway, by three products; else as float32."""
    if not mm.narrow:
        return mm.nn(x, y)
    (x_high, x_low), (y_high, y_low) = parts_of(x, 2), parts_of(y, 2)
    return mm.nn(x_high, y_high) + (mm.nn(x_high, y_low) + mm.nn(x_low, y_high))
