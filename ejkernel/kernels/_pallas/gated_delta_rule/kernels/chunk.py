"""A chunk once its scores are known, for every kind of gate: forward and backward.

    (I + M diag(b)) E = V - kP S,   U = b E           E: what the state did not predict, U: what is written
    o = qP S + N U,                 S' = whole S + ks^T U

qP, kP are rows times the decays since the chunk's start, ks keys times the decays to its end, N[t, s] = q_t . k_s and
M[t, s] = k_t . k_s with the decays after s up to t. The system is solved for E, not for U, so that the gradient of beta is
exact where beta is 0.
"""

from __future__ import annotations

from typing import NamedTuple

from ejkernel.kernels._pallas._products import Array, Products, row_sums
from ejkernel.kernels._pallas.gated_delta_rule.kernels.triangular import UnitLower


class Scores(NamedTuple):
    """What a kind of gate makes of queries, keys and decays."""

    N: Array  # [C, C]: lower triangular
    M: Array  # [C, C]: strictly lower triangular
    qP: Array  # [C, K]
    kP: Array  # [C, K]
    ks: Array  # [C, K]
    whole: Array | None  # [1, 1] or [K, V]: the chunk's decay of the state; None: no gate

    def decayed(self, S: Array) -> Array:
        return S if self.whole is None else S * self.whole


class ScoresGrads(NamedTuple):
    """Adjoints of the scores; that of `whole` is of its logarithm, entry by entry."""

    N: Array  # [C, C], meaningful on and below the diagonal
    M: Array  # [C, C], meaningful below it
    qP: Array  # [C, K]
    kP: Array  # [C, K]
    ks: Array  # [C, K]
    whole: Array  # [K, V]


class Rows(NamedTuple):
    """What a head writes in a chunk."""

    v: Array  # [C, V]
    b: Array  # [C, 1]: beta
    b_row: Array  # [1, C]


def forward(mm: Products, s: Scores, system: UnitLower, rows: Rows, S: Array) -> tuple[Array, Array]:
    """(output [C, V] before its scale, state after the chunk [K, V])."""
    U = rows.b * system.solve(rows.v - mm.nn(s.kP, S))  # [C, V]
    return mm.nn(s.qP, S) + mm.nn(s.N, U), s.decayed(S) + mm.tn(s.ks, U)


def backward(
    mm: Products, s: Scores, system: UnitLower, rows: Rows, S: Array, dS: Array, do: Array
) -> tuple[Array, Array, Array, ScoresGrads]:
    """(dv [C, V], gradient of beta [C, 1], adjoint of the state before the chunk [K, V], adjoints of the scores)."""
    E = system.solve(rows.v - mm.nn(s.kP, S))  # [C, V]
    U = rows.b * E
    dU = mm.tn(s.N, do) + mm.nn(s.ks, dS)  # [C, V]: through output and state
    dR = system.solve_transposed(rows.b * dU)  # [C, V]
    # E = R - M U, so what a row writes also changes every later error of the chunk.
    db = row_sums((dU - mm.tn(s.M, dR)) * E)  # [C, 1]
    grads = ScoresGrads(
        N=mm.nt(do, U), M=-mm.nt(dR, U), qP=mm.nt(do, S), kP=-mm.nt(dR, S), ks=mm.nt(U, dS), whole=s.decayed(S) * dS
    )
    return dR, db, s.decayed(dS) + mm.tn(s.qP, do) - mm.tn(s.kP, dR), grads
