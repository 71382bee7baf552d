"""Matrix products of the chunk algorithms, and the dyadic tree of decay products inside a chunk.

A chunk has C = 2^n rows. For blocks of h = 1, 2, 4, ..., C rows the tree keeps

    pre[t] = product of the decays from the block's first row to t (t included)
    suf[s] = product of the decays after s to the block's last row (s excluded: decay comes before the update)

so that the decay from row s to row t > s is suf[s] * pre[t] at the one h where t and s lie in the right and the left half of
the same 2h-block. Every factor is a product of decays: nothing is subtracted or divided, and a decay of 0 is just a 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = jax.Array


class Matmul(NamedTuple):
    """Batched matrix products with operands in `operand` precision and sums in the state's."""

    operand: np.dtype
    accumulate: np.dtype

    def _einsum(self, spec: str, x: Array, y: Array) -> Array:
        return jnp.einsum(
            spec,
            x.astype(self.operand),
            y.astype(self.operand),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=self.accumulate,
        )

    def exact(self, spec: str, x: Array | np.ndarray, y: Array) -> Array:
        """A sum over rows, written as a product with zeros and ones, without rounding the operands."""
        return jnp.einsum(spec, jnp.asarray(x, self.accumulate), y, precision=lax.Precision.HIGHEST)

    def nn(self, x: Array, y: Array) -> Array:
        """x y."""
        return self._einsum("...mk,...kn->...mn", x, y)

    def nt(self, x: Array, y: Array) -> Array:
        """x y^T."""
        return self._einsum("...mk,...nk->...mn", x, y)

    def tn(self, x: Array, y: Array) -> Array:
        """x^T y. The transpose is written out: XLA's CPU products read a transposed left side slowly."""
        return self.nn(jnp.swapaxes(x, -1, -2), y)


class Level(NamedTuple):
    """Decay products inside blocks of `h` rows; both `[..., C, D]`, or None where there is no gate."""

    h: int
    pre: Array | None
    suf: Array | None

    def right(self, x: Array) -> Array:
        """x * pre: what a row of a right half multiplies."""
        return x if self.pre is None else x * self.pre

    def left(self, x: Array) -> Array:
        """x * suf: what a row of a left half multiplies."""
        return x if self.suf is None else x * self.suf


def halves(x: Array, h: int) -> Array:
    """`[..., C, D]` as `[..., C / 2h, 2, h, D]`: axis -3 tells the left from the right half of each 2h-block."""
    return x.reshape(*x.shape[:-2], x.shape[-2] // (2 * h), 2, h, x.shape[-1])


def is_right(h: int, rows: int) -> np.ndarray:
    """`[C, 1]`: whether a row lies in the right half of its 2h-block."""
    return (np.arange(rows) // h % 2 == 1)[:, None]


def levels(decay: Array | None, rows: int) -> Iterator[Level]:
    """The tree's levels h = 1, 2, ..., C of decays `[..., C, D]`; all factors are None without a gate."""
    if decay is None:
        yield from (Level(1 << i, None, None) for i in range(rows.bit_length()))
        return
    pre, suf, h = decay, jnp.ones_like(decay), 1
    while True:
        yield Level(h, pre, suf)
        if h == rows:
            return
        p, s = halves(pre, h), halves(suf, h)  # [..., C/2h, 2, h, D]
        left_total, right_total = p[..., :1, -1:, :], p[..., 1:, -1:, :]
        right = np.array([False, True])[:, None, None]
        pre = (p * jnp.where(right, left_total, 1)).reshape(decay.shape)
        suf = (s * jnp.where(right, 1, right_total)).reshape(decay.shape)
        h *= 2


def push_down(at_level: dict[int, Array], dpre: Array, dsuf: Array) -> Array:
    """The gradient of the log decays `[..., C, D]` from the adjoints of log pre and log suf. Only additions: nothing cancels.

    Args:
        at_level: for each h < C, `[..., C, D]`: the adjoint of log pre in right halves and of log suf in left halves.
        dpre, dsuf: both adjoints at h = C.
    """
    rows, h = dpre.shape[-2], dpre.shape[-2] // 2
    while h >= 1:
        p, s = halves(dpre, h), halves(dsuf, h)  # [..., C/2h, 2, h, D]
        # A right row's prefix holds the left block's total, a left row's suffix the right block's; each total is the
        # prefix at its block's last row.
        to_left_total = jnp.sum(p[..., 1:, :, :], -2, keepdims=True)
        to_right_total = jnp.sum(s[..., :1, :, :], -2, keepdims=True)
        right = np.array([False, True])[:, None, None]
        last = (np.arange(h) == h - 1)[:, None]
        totals = jnp.where(right, to_right_total, to_left_total)
        extra = at_level[h]
        dpre = (p + jnp.where(last, totals, 0)).reshape(extra.shape) + jnp.where(is_right(h, rows), extra, 0)
        dsuf = dsuf + jnp.where(is_right(h, rows), 0, extra)
        h //= 2
    return dpre
