"""Scores of chunks with one decay per token and head, or none: N = (q k^T) * D, M = (k k^T) * D below the diagonal.

D[t, s] is exp of the sum of the log decays after s up to t. A product with a triangle of ones adds up each of these sums by
itself, so that strong gates neither cancel nor overflow.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels._pallas._products import Array, Products, column_sums, positions, row_sums
from ejkernel.kernels._pallas.gated_delta_rule.kernels.chunk import Scores, ScoresGrads


class Decay(NamedTuple):
    """The decays of one head in one chunk."""

    matrix: Array  # [C, C]
    pre: Array  # [C, 1]
    suf: Array  # [C, 1]

    @classmethod
    def of(cls, mm: Products, prefix: Array, suffix: Array, log: Array) -> Decay:
        """From log decays `[C, 1]`, and their sums up to each row and after it."""
        C = log.shape[0]
        t, s = positions(C, C)
        between = mm.sums(t >= s, jnp.where(t > s, log, 0.0))  # [C, C]: the sums over s < r <= t
        matrix = jnp.where(t >= s, jnp.exp(jnp.where(t >= s, between, 0.0)), 0.0)
        return cls(matrix, jnp.exp(prefix), jnp.exp(suffix))


class LogGrads(NamedTuple):
    """What the gradient of a row's log decay is added up from, each `[C, 1]`."""

    pre: Array  # row r takes those of t >= r
    suf: Array  # row r takes those of s < r
    spans: Array  # row r takes its own


def scores(mm: Products, q: Array, k: Array, decay: Decay | None) -> Scores:
    """The scores of rows `[C, K]`."""
    C = q.shape[0]
    t, s = positions(C, C)
    N, M = jnp.where(t >= s, mm.nt(q, k), 0.0), jnp.where(t > s, mm.nt(k, k), 0.0)  # [C, C]
    if decay is None:
        return Scores(N, M, q, k, k, None)
    return Scores(N * decay.matrix, M * decay.matrix, q * decay.pre, k * decay.pre, k * decay.suf, decay.pre[-1:])


def gradients(
    mm: Products, q: Array, k: Array, decay: Decay | None, found: Scores, d: ScoresGrads
) -> tuple[Array, Array, LogGrads | None]:
    """(dq [C, K], dk [C, K], of the log decays)."""
    C = q.shape[0]
    t, s = positions(C, C)
    dN, dM = jnp.where(t >= s, d.N, 0.0), jnp.where(t > s, d.M, 0.0)
    dqP, dkP, dks, dlog = d.qP, d.kP, d.ks, None
    if decay is not None:
        dlog = _log_gradient(mm, dN * found.N + dM * found.M, found, d)
        dN, dM = dN * decay.matrix, dM * decay.matrix
        dqP, dkP, dks = dqP * decay.pre, dkP * decay.pre, dks * decay.suf
    return mm.nn(dN, k) + dqP, mm.tn(dN, q) + mm.nn(dM, k) + mm.tn(dM, k) + dkP + dks, dlog


def _log_gradient(mm: Products, from_scores: Array, found: Scores, d: ScoresGrads) -> LogGrads:
    """Row r's decay is a factor of N, M [t, s] with s < r <= t, of qP, kP [t] with t >= r, of ks [s] with s < r, of the whole.

    Only additions: nothing cancels that does not cancel in the sum itself.
    """
    C = from_scores.shape[0]
    t, s = positions(C, C)
    through = column_sums(row_sums(d.whole))  # [1, 1]
    last = jax.lax.broadcasted_iota(jnp.int32, (C, 1), 0) == C - 1
    from_pre = row_sums(d.qP * found.qP + d.kP * found.kP) + jnp.where(last, through, 0.0)  # [C, 1]
    from_suf = row_sums(d.ks * found.ks)  # [C, 1]
    spans = jnp.where(t > s, mm.sums(t >= s, from_scores, transposed=True), 0.0)  # [r, s]: over t >= r, kept where s < r
    return LogGrads(from_pre, from_suf, row_sums(spans))
