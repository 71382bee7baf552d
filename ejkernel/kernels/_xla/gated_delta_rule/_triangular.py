"""Systems (I + L) E = R with a strictly lower triangular L [C, C], solved by block substitution.

Diagonal tiles of up to 16 rows are inverted along their dyadic tree, X_2h = [[X_1, 0], [-X_2 L_21 X_1, X_2]]; E then follows
tile by tile, each refined once by what it leaves of R. No power of L is ever formed and no inverse of more than 16 rows, so
that keys which point the same way cost hardly a digit.
A level of the tree is the product X L' X of whole tiles, L' being L where rows lie in right and columns in left halves. That
adds zeros elsewhere, and XLA is slow at products smaller than a tile.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels._xla.linear._products import Array, Matmul, aligned

TILE = 16


class UnitLower(NamedTuple):
    """I + L, ready to solve."""

    L: Array  # [..., C, C]: zero on and above the diagonal
    inverses: tuple[Array, ...]  # of the diagonal tiles, each [..., tile, tile]

    def solve(self, mm: Matmul, R: Array) -> Array:
        """E `[..., C, V]` with (I + L) E = R."""
        found: list[Array] = []
        for i, X in enumerate(self.inverses):
            at = slice(i * X.shape[-1], (i + 1) * X.shape[-1])
            rest = R[..., at, :]
            if found:
                rest = rest - mm.nn(self.L[..., at, : at.start], jnp.concatenate(found, -2))
            E = mm.nn(X, rest)
            found.append(E + mm.nn(X, rest - E - mm.nn(self.L[..., at, at], E)))
        return jnp.concatenate(found, -2)

    def solve_transposed(self, mm: Matmul, Y: Array) -> Array:
        """R `[..., C, V]` with (I + L)^T R = Y."""
        L_t = transposed(self.L)
        found: list[Array] = []
        for i, X in reversed(list(enumerate(self.inverses))):
            at = slice(i * X.shape[-1], (i + 1) * X.shape[-1])
            rest = Y[..., at, :]
            if found:
                rest = rest - mm.nn(L_t[..., at, at.stop :], jnp.concatenate(found, -2))
            found.insert(0, mm.nn(transposed(X), rest))
        return jnp.concatenate(found, -2)


def unit_lower(mm: Matmul, L: Array) -> UnitLower:
    """`I + L`; C is a power of two."""
    tile = min(TILE, L.shape[-1])
    tiles = diagonal_blocks(L, tile)  # [..., C/tile, tile, tile]
    X = aligned(np.eye(tile), tiles) - masked(tiles, level_pairs(1, tile))
    h = 2
    while h < tile:
        X = X - mm.nn(mm.nn(X, masked(tiles, level_pairs(h, tile))), X)
        h *= 2
    return UnitLower(L, tuple(X[..., i, :, :] for i in range(X.shape[-3])))


def transposed(x: Array) -> Array:
    """x^T, in memory: XLA's CPU library takes no transposed left operand, and the barrier keeps the transpose out of it."""
    return lax.optimization_barrier(jnp.swapaxes(x, -1, -2))


def level_pairs(h: int, tile: int) -> np.ndarray:
    """`[tile, tile]`: where the row lies in the right and the column in the left half of the same 2h-block."""
    row, column = np.arange(tile)[:, None], np.arange(tile)[None, :]
    return (row // h % 2 == 1) & (column // h == row // h - 1)


def masked(x: Array, mask: np.ndarray) -> Array:
    """`x` where the mask of its last axes is set, 0 elsewhere (also where x is not a number)."""
    return jnp.where(aligned(mask, x, bool), x, 0)


def diagonal_blocks(x: Array, h: int) -> Array:
    """The diagonal blocks of `[..., C, C]`: `[..., C / h, h, h]`."""
    return jnp.stack([x[..., i : i + h, i : i + h] for i in range(0, x.shape[-1], h)], -3)


def lower_blocks(x: Array, h: int) -> Array:
    """The lower left quarters of the diagonal 2h-blocks of `[..., C, C]`: `[..., C / 2h, h, h]`."""
    return jnp.stack([x[..., i + h : i + 2 * h, i : i + h] for i in range(0, x.shape[-1], 2 * h)], -3)


def grown(first: Array, low: Array, second: Array) -> Array:
    """`[[first, 0], [low, second]]` for blocks `[..., h, h]`."""
    upper = jnp.concatenate([first, jnp.zeros_like(first)], -1)
    return jnp.concatenate([upper, jnp.concatenate([low, second], -1)], -2)
