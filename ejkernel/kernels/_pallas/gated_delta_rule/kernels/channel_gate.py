"""Scores of chunks with one decay per key channel: N[t, s] = sum_c q[t, c] D[t, s, c] k[s, c], M likewise with k for q.

D[t, s, c] is never formed. At the one level h of the tree where rows t and s meet it is a factor of row t times one of row s.
So a level's part of N and M is one product each, of the rows q or k with the rows k, all times their factors.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ejkernel.kernels._pallas._products import Array, Products, positions, row_sums
from ejkernel.kernels._pallas.gated_delta_rule.kernels.chunk import Scores, ScoresGrads
from ejkernel.kernels._pallas.linear.kernels.tree import Tree, meeting, right_rows, steps, with_right_rows


def scores(mm: Products, q: Array, k: Array, log: Array, V: int) -> Scores:
    """The scores of rows and log decays `[C, K]`, for states `[K, V]`."""
    C = q.shape[0]
    t, s = positions(C, C)
    N = jnp.where(t == s, row_sums(q * k), 0.0)  # [C, C]
    M = jnp.zeros_like(N)
    tree = Tree.of(mm, log)
    for h in steps(1, C):
        factor = jnp.exp(tree.levels[h])  # [C, K]
        x, y = right_rows(h, q * factor), k * factor
        meet = right_rows(h, meeting(h, C))  # [C or C / 2, C]
        put = lambda A, level, h=h, meet=meet: with_right_rows(h, A, jnp.where(meet, level, right_rows(h, A)))
        N, M = put(N, mm.nt(x, y)), put(M, mm.nt(right_rows(h, y), y))
    pre, suf = jnp.exp(tree.pre), jnp.exp(tree.suf)  # [C, K]
    return Scores(N, M, q * pre, k * pre, k * suf, jnp.exp(mm.spread_sums(log, V)))


def gradients(mm: Products, q: Array, k: Array, log: Array, found: Scores, d: ScoresGrads) -> tuple[Array, Array, Array]:
    """(dq, dk, gradient of the log decays), each `[C, K]`."""
    C = q.shape[0]
    t, s = positions(C, C)
    tree = Tree.of(mm, log)
    pre, suf = jnp.exp(tree.pre), jnp.exp(tree.suf)
    own = row_sums(jnp.where(t == s, d.N, 0.0))  # [C, 1]: of a row's own key, which no decay comes between
    dq = own * k + d.qP * pre
    dk = own * q + d.kP * pre + d.ks * suf
    last = jax.lax.broadcasted_iota(jnp.int32, (C, 1), 0) == C - 1
    dpre = d.qP * found.qP + d.kP * found.kP + jnp.where(last, mm.row_sums_in_a_row(d.whole), 0.0)
    levels = {}
    for h in steps(1, C):
        factor = jnp.exp(tree.levels[h])
        x, y = q * factor, k * factor
        meet = right_rows(h, meeting(h, C))
        dN, dM = (jnp.where(meet, right_rows(h, A), 0.0) for A in (d.N, d.M))  # [C or C / 2, C]
        dx = mm.nn(dN, y)  # [C or C / 2, K]: rows of right halves
        right = mm.nn(dM, y)
        left = mm.tn(dN, right_rows(h, x)) + mm.tn(dM, right_rows(h, y))  # [C, K]
        dq = with_right_rows(h, dq, right_rows(h, dq) + dx * right_rows(h, factor))
        dy = with_right_rows(h, left, right)
        dk += dy * factor
        levels[h] = with_right_rows(h, dy * y, right * right_rows(h, y) + dx * right_rows(h, x))
    return dq, dk, tree.gradient(levels, dpre, d.ks * found.ks)
