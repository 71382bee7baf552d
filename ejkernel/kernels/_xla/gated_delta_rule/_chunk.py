"""A chunk once its scores are known, for every kind of gate: forward and backward.

    (I + M diag(b)) E = V - kP S,   U = b E           E: what the state did not predict, U: what is written
    o = qP S + N U,                 S' = total S + ks^T U

qP, kP are rows times the decays since the chunk's start, ks keys times the decays to its end, N[t, s] = q_t . k_s and
M[t, s] = k_t . k_s with the decays after s up to t. The system is solved for E, not for U, so that the gradient of beta is
exact where beta is 0.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from ejkernel.kernels._xla.gated_delta_rule._triangular import transposed, unit_lower
from ejkernel.kernels._xla.linear._products import Array, Matmul


class Scores(NamedTuple):
    """What a kind of gate makes of queries, keys and decays."""

    N: Array  # [..., C, C]: lower triangular
    M: Array  # [..., C, C]: strictly lower triangular
    qP: Array  # [..., C, K]
    kP: Array  # [..., C, K]
    ks: Array  # [..., C, K]
    total: Array | None  # [..., 1 | K, 1]: the chunk's whole decay; None: no gate


class ScoresGrads(NamedTuple):
    """Adjoints of the scores; that of `total` is of its logarithm."""

    N: Array  # [..., C, C], meaningful on and below the diagonal
    M: Array  # [..., C, C], meaningful below it
    qP: Array
    kP: Array
    ks: Array
    total: Array  # [..., K]


def forward(mm: Matmul, S: Array, s: Scores, v: Array, b: Array) -> tuple[Array, Array]:
    """(state after the chunk `[..., K, V]`, output `[..., C, V]`); v `[..., C, V]`, b `[..., C, 1]`."""
    U = b * unit_lower(mm, s.M * jnp.swapaxes(b, -1, -2)).solve(mm, v - mm.nn(s.kP, S))
    return _decayed(S, s) + mm.nn(transposed(s.ks), U), mm.nn(s.qP, S) + mm.nn(s.N, U)


def backward(
    mm: Matmul, S: Array, dS: Array, s: Scores, v: Array, b: Array, do: Array
) -> tuple[Array, Array, Array, ScoresGrads]:
    """(adjoint of the state before the chunk, dv, db `[..., C, 1]`, adjoints of the scores)."""
    system = unit_lower(mm, s.M * jnp.swapaxes(b, -1, -2))
    E = system.solve(mm, v - mm.nn(s.kP, S))  # [..., C, V]
    U = b * E
    dU = mm.nn(transposed(s.N), do) + mm.nn(s.ks, dS)  # [..., C, V]: through output and state
    dR = system.solve_transposed(mm, b * dU)  # [..., C, V]
    # E = R - M U, so what a row writes also changes every later error of the chunk.
    db = mm.row_sums((dU - mm.nn(transposed(s.M), dR)) * E)
    grads = ScoresGrads(
        N=mm.nt(do, U),
        M=-mm.nt(dR, U),
        qP=mm.nt(do, S),
        kP=-mm.nt(dR, S),
        ks=mm.nt(U, dS),
        total=mm.row_sums(_decayed(S, s) * dS)[..., 0],
    )
    return _decayed(dS, s) + mm.nn(transposed(s.qP), do) - mm.nn(transposed(s.kP), dR), dR, db, grads


def _decayed(S: Array, s: Scores) -> Array:
    return S if s.total is None else S * s.total
