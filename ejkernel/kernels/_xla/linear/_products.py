"""Matrix products of the chunk algorithms, and the dyadic tree of decay products inside a chunk.

A chunk has C = 2^n rows. For blocks of h = 1, 2, 4, ..., C rows the tree keeps

    pre[t] = product of the decays from the block's first row to t (t included)
    suf[s] = product of the decays after s to the block's last row (s excluded: decay comes before the update)

so that the decay from row s to row t > s is suf[s] * pre[t] at the one h where t and s lie in the right and the left half of
the same 2h-block. Every factor is a product of decays: nothing is subtracted or divided, and a decay of 0 is just a 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel._varying import constant

Array = jax.Array
SPREAD = 128  # columns from which x^T y is as fast as it stands on a CPU, measured with jax 0.10 and 0.12


class Matmul(NamedTuple):
    """Batched matrix products with operands in `operand` precision and sums in the state's."""

    operand: np.dtype
    accumulate: np.dtype
    on_cpu: bool

    def _einsum(self, spec: str, x: Array, y: Array) -> Array:
        return jnp.einsum(
            spec,
            x.astype(self.operand),
            y.astype(self.operand),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=self.accumulate,
        )

    def exact(self, spec: str, x: Array | np.ndarray, y: Array | np.ndarray) -> Array:
        """A sum written as a product with zeros and ones, without rounding the operands."""
        x, y = (constant(z, self.accumulate) if isinstance(z, np.ndarray) else z.astype(self.accumulate) for z in (x, y))
        return jnp.einsum(spec, x, y, precision=lax.Precision.HIGHEST)

    def row_sums(self, x: Array) -> Array:
        """Sums over the last axis, kept as an axis of one. As a product: XLA's CPU reductions there go one by one."""
        return self.exact("...k,ki->...i", x, np.ones((x.shape[-1], 1)))

    def nn(self, x: Array, y: Array) -> Array:
        """x y."""
        return self._einsum("...mk,...kn->...mn", x, y)

    def nt(self, x: Array, y: Array) -> Array:
        """x y^T."""
        return self._einsum("...mk,...nk->...mn", x, y)

    def tn(self, x: Array, y: Array) -> Array:
        """x^T y."""
        if self.on_cpu and y.shape[-1] < SPREAD:
            # XLA's CPU library takes no transposed left operand, and what takes it instead is slow unless it can spread a
            # product over threads. The barrier keeps the transpose out of the product.
            return self.nn(lax.optimization_barrier(jnp.swapaxes(x, -1, -2)), y)
        return self._einsum("...km,...kn->...mn", x, y)


def pass_on(S: Array, added: Array, factors: Sequence[Array | None], backwards: bool = False) -> tuple[Array, Array]:
    """A state through the M chunks of a group: (what enters each chunk `[..., M, K, V]`, what leaves the last `[..., K, V]`).

    Args:
        S: `[..., K, V]`, entering the first chunk, or the last when `backwards`.
        added: `[..., M, K, V]`, what each chunk adds after its decay.
        factors: a chunk's decays, each broadcastable to `[..., M, K, V]`; None is no decay.
    """
    chunks = added.shape[-3]
    entering: list[Array] = []
    for m in reversed(range(chunks)) if backwards else range(chunks):
        entering.append(S)
        for factor in factors:
            S = S if factor is None else S * factor[..., m, :, :]
        S = S + added[..., m, :, :]
    return jnp.stack(entering[::-1] if backwards else entering, -3), S


def aligned(values: np.ndarray, x: Array, dtype: Any = None) -> Array:
    """A constant for the last axes of x, in its rank, and in x's dtype unless another is named."""
    return constant(values.reshape((1,) * (x.ndim - values.ndim) + values.shape), x.dtype if dtype is None else dtype)


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


def halves(x: Array, h: int) -> tuple[Array, Array]:
    """The left and the right halves of every 2h-block of `[..., C, D]`, each `[..., C / 2h, h, D]`."""
    blocks = x.reshape(*x.shape[:-2], x.shape[-2] // (2 * h), 2, h, x.shape[-1])
    return blocks[..., 0, :, :], blocks[..., 1, :, :]


def joined(left: Array, right: Array) -> Array:
    """Halves `[..., C / 2h, h, D]` back to `[..., C, D]`."""
    x = jnp.stack([left, right], -3)
    return x.reshape(*x.shape[:-4], x.shape[-4] * 2 * x.shape[-2], x.shape[-1])


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
        (p1, p2), (s1, s2) = halves(pre, h), halves(suf, h)  # [..., C/2h, h, D]
        pre, suf = joined(p1, p2 * p1[..., -1:, :]), joined(s1 * p2[..., -1:, :], s2)
        h *= 2


def push_down(at_level: dict[int, Array], dpre: Array, dsuf: Array) -> Array:
    """The gradient of the log decays `[..., C, D]` from the adjoints of log pre and log suf. Only additions: nothing cancels.

    Args:
        at_level: for each h < C, `[..., C, D]`: the adjoint of log pre in right halves and of log suf in left halves.
        dpre, dsuf: both adjoints at h = C.
    """
    h = dpre.shape[-2] // 2
    while h >= 1:
        (p1, p2), (s1, s2), (extra_suf, extra_pre) = halves(dpre, h), halves(dsuf, h), halves(at_level[h], h)
        # A right row's prefix holds the left block's total, a left row's suffix the right block's; each total is the
        # prefix at its block's last row.
        last = aligned((np.arange(h) == h - 1)[:, None], p1, bool)
        to_left = jnp.where(last, jnp.sum(p2, -2, keepdims=True), 0)
        to_right = jnp.where(last, jnp.sum(s1, -2, keepdims=True), 0)
        dpre, dsuf = joined(p1 + to_left, p2 + to_right + extra_pre), joined(s1 + extra_suf, s2)
        h //= 2
    return dpre
