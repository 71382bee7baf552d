"""The dyadic tree of log decays inside a chunk.

Rows s < t meet at the one h where t lies in the right and s in the left half of a block of 2h rows. The decay from s to t is
then exp of the sum from the right half's first row to t, times exp of the sum after s to the left half's last row. Such sums
are only ever added up: nothing is subtracted, so strong gates neither cancel nor overflow.

Inside 8 rows, which a vector register holds, sums are products with zeros and ones. Of longer blocks they are made by doubling:
a right half's rows add the left half's whole sum to their prefix, a left half's rows the right half's to their suffix. Right
and left halves are whole registers there, so that choosing between them costs nothing. Gradients go the same way back.

A weakly gated chunk starts the tree at blocks of at most `BASE` rows, inside which exp(prefix) and exp(-prefix) are finite
factors.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels._pallas._products import Array, Products, positions

BASE = 32
REGISTER = 8  # rows of a vector register


def steps(first: int, rows: int) -> list[int]:
    """h = first, 2 first, ..., below the chunk's rows."""
    found = []
    while first < rows:
        found.append(first)
        first *= 2
    return found


def is_right(h: int, rows: int) -> Array:
    """`[C, 1]`: whether a row lies in the right half of its block of 2h rows."""
    return jax.lax.broadcasted_iota(jnp.int32, (rows, 1), 0) & h != 0


def halves(h: int, rows: int) -> Array:
    """`[C, C]`: which rows r a row adds up: in right halves of h rows those up to it, in left halves those after it."""
    t, r = positions(rows, rows)
    right = t & h != 0
    return ((t ^ r) < h) & (right == (r <= t))


def meeting(h: int, rows: int, transposed: bool = False) -> Array:
    """`[C, C]`: the pairs of a right row t and a left row s of the same block of 2h rows; `transposed`: [s, t]."""
    t, s = positions(rows, rows)[:: -1 if transposed else 1]
    return (t & h != 0) & (s & h == 0) & ((t ^ s) < 2 * h)


def meet_anywhere(h: int, rows: int) -> Array:
    """`[C, C]`: the pairs of rows that meet at h, right with left and left with right."""
    t, s = positions(rows, rows)
    return ((t ^ s) >= h) & ((t ^ s) < 2 * h)


def inside(h: int, rows: int) -> Array:
    """`[C, C]`: pairs s <= t of the same block of h rows."""
    t, s = positions(rows, rows)
    return ((t ^ s) < h) & (s <= t)


def before(h: int, rows: int) -> Array:
    """`[C, C]`: pairs s < t of the same block of h rows."""
    t, s = positions(rows, rows)
    return ((t ^ s) < h) & (s < t)


def choose(h: int, right: Array, left: Array) -> Array:
    """`[C, D]`: of rows in right halves one array, of rows in left halves the other."""
    C = right.shape[0]
    if h < REGISTER:
        return jnp.where(is_right(h, C), right, left)
    return jnp.concatenate([(right if i & h else left)[i : i + h] for i in range(0, C, h)], 0)


def right_rows(h: int, x: Array) -> Array:
    """`[C, D]` to `[C / 2, D]`: the rows of right halves alone; all rows where halves are parts of a register."""
    if h < REGISTER:
        return x
    return jnp.concatenate([x[i : i + h] for i in range(h, x.shape[0], 2 * h)], 0)


def with_right_rows(h: int, x: Array, new: Array) -> Array:
    """`x` with other rows in right halves, as `right_rows` gives them."""
    if h < REGISTER:
        return jnp.where(is_right(h, x.shape[0]), new, x)
    blocks = []
    for n, i in enumerate(range(0, x.shape[0], 2 * h)):
        blocks += [x[i : i + h], new[n * h : (n + 1) * h]]
    return jnp.concatenate(blocks, 0)


class Factor(NamedTuple):
    """Decays `[C, D]` that multiply rows, and the ones by which their logarithms were added up."""

    products: Products
    which: Array  # [C, C]
    log: Array  # [C, D]

    @classmethod
    def of(cls, products: Products, which: Array, log: Array) -> Factor:
        return cls(products, which, products.sums(which, log))

    @property
    def factor(self) -> Array:
        return jnp.exp(self.log)

    def reciprocal(self) -> Factor:
        """Of the negative sums: finite for weak gates."""
        return self._replace(log=-self.log)


def times(x: Array, factor: Factor | None) -> Array:
    return x if factor is None else x * factor.factor


class Tree(NamedTuple):
    """Sums of a chunk's log decays `[C, D]`, each `[C, D]`.

    Attributes:
        base: the rows of the blocks that the tree starts from.
        levels: for every h from `base` on, of a right half's rows the sum up to each, of a left half's the sum after it.
        blocks: the sum up to a row inside its block of `base` rows.
        pre, suf: the sum up to a row, and the sum after it, inside the chunk.
    """

    products: Products
    base: int
    levels: dict[int, Array]
    blocks: Array
    pre: Array
    suf: Array

    @classmethod
    def of(cls, products: Products, log: Array, base: int = 1) -> Tree:
        """Of 1 row, or of whole registers."""
        C = log.shape[0]
        levels = {h: products.sums(halves(h, C), log) for h in steps(base, REGISTER)}
        up_to, after = _in_registers(C)
        pre, suf = products.sums(up_to, log), products.sums(after, log)
        blocks = pre
        for h in steps(REGISTER, C):
            if h >= base:
                levels[h] = choose(h, pre, suf)
            pre, suf = _doubled(pre, suf, h)
            blocks = pre if 2 * h == base else blocks
        return cls(products, base, levels, blocks, pre, suf)

    def gradient(self, levels: dict[int, Array], pre: Array, suf: Array, blocks: Array | None = None) -> Array:
        """`[C, D]`: the gradient of the log decays from those of the sums."""
        C = pre.shape[0]
        whole = jnp.zeros_like(pre)  # of the sum of a register's rows, in parts that lie anywhere in it
        for h in reversed(steps(REGISTER, C)):
            if blocks is not None and 2 * h == self.base:
                pre = pre + blocks
            whole = whole + _of_halves(pre, suf, h)
            if h in levels:
                pre, suf = choose(h, pre + levels[h], pre), choose(h, suf, suf + levels[h])
        up_to, after = _in_registers(C)
        found = self.products.sums(up_to, pre, transposed=True) + self.products.sums(after, suf, transposed=True)
        t, s = positions(C, C)
        found += self.products.sums((t ^ s) < REGISTER, whole)
        for h in steps(self.base, REGISTER):
            found += self.products.sums(halves(h, C), levels[h], transposed=True)
        return found


def _in_registers(rows: int) -> tuple[Array, Array]:
    """`[C, C]`, twice: the rows of its own register up to a row, and those after it."""
    t, s = positions(rows, rows)
    same = (t ^ s) < REGISTER
    return same & (s <= t), same & (s > t)


def _doubled(pre: Array, suf: Array, h: int) -> tuple[Array, Array]:
    """Sums inside blocks of h rows as sums inside blocks of 2h rows."""
    before, after = [], []
    for i in range(0, pre.shape[0], 2 * h):
        middle, end = i + h, i + 2 * h
        before += [pre[i:middle], pre[middle:end] + pre[middle - 1 : middle]]
        after += [suf[i:middle] + pre[end - 1 : end], suf[middle:end]]
    return jnp.concatenate(before, 0), jnp.concatenate(after, 0)


def _of_halves(pre: Array, suf: Array, h: int) -> Array:
    """What `_doubled` makes of the halves' whole sums: their gradient, over all registers of a half, in any row of each."""
    blocks = []
    for i in range(0, pre.shape[0], 2 * h):
        for rows in (pre[i + h : i + 2 * h], suf[i : i + h]):  # of the left half's sum, and of the right half's
            parts = rows.reshape(h // REGISTER, REGISTER, rows.shape[1])
            blocks.append(jnp.broadcast_to(jnp.sum(parts, 0)[None], parts.shape).reshape(rows.shape))
    return jnp.concatenate(blocks, 0)
