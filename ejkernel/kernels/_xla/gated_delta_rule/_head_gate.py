"""Scores of chunks with one decay per row, or none: N = (q k^T) * D, M = (k k^T) * D strictly below the diagonal.

D[t, s] is the product of the decays after s up to t, one matrix for the head, from the dyadic tree: nothing is divided.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._xla.gated_delta_rule._chunk import Scores, ScoresGrads
from ejkernel.kernels._xla.gated_delta_rule._triangular import masked
from ejkernel.kernels._xla.linear._products import Array, Matmul
from ejkernel.kernels._xla.linear._scalar_chunk import Decay, decay_of


def scores(mm: Matmul, q: Array, k: Array, decay: Array | None) -> tuple[Scores, Decay | None]:
    """The scores of rows `[..., C, K]` with decays `[..., C]`, and what `gradients` takes again."""
    lower, below = _triangles(q.shape[-2])
    qk, kk = mm.nt(q, k), mm.nt(k, k)  # [..., C, C]
    if decay is None:
        return Scores(masked(qk, lower), masked(kk, below), q, k, k, None), None
    D = decay_of(decay, q)
    assert D.pre is not None
    assert D.suf is not None
    # Zeros times what is not finite would not be zero, so the triangles are cut out of the products too.
    found = Scores(masked(qk, lower) * D.matrix, masked(kk, below) * D.matrix, q * D.pre, k * D.pre, k * D.suf, D.total())
    return found, D


def gradients(mm: Matmul, q: Array, k: Array, s: Scores, D: Decay | None, d: ScoresGrads) -> tuple[Array, Array, Array | None]:
    """(dq, dk, gradient of the log decays `[..., C]`)."""
    rows = q.shape[-2]
    lower, below = _triangles(rows)
    dN, dM = masked(d.N, lower), masked(d.M, below)
    dqP, dkP, dks = d.qP, d.kP, d.ks
    dg = None
    if D is not None:
        assert D.pre is not None
        assert D.suf is not None
        dg = _gate_gradient(mm, dN * s.N + dM * s.M, s, d)
        dN, dM = dN * D.matrix, dM * D.matrix
        dqP, dkP, dks = dqP * D.pre, dkP * D.pre, dks * D.suf
    dN_t = jnp.swapaxes(dN, -1, -2)
    dq = mm.nn(dN, k) + dqP
    dk = mm.nn(dN_t, q) + mm.nn(dM + jnp.swapaxes(dM, -1, -2), k) + dkP + dks
    return dq, dk, dg


def _gate_gradient(mm: Matmul, from_scores: Array, s: Scores, d: ScoresGrads) -> Array:
    """Row r's decay is a factor of N, M [t, s] with s < r <= t, of qP, kP [t] with t >= r, of ks [s] with s < r, of total.

    Only additions: nothing cancels that does not cancel in the sum itself.
    """
    rows, dtype = from_scores.shape[-1], from_scores.dtype
    upto = np.tril(np.ones((rows, rows), np.dtype(dtype)))  # upto[t, r]: r <= t
    after = np.tril(np.ones((rows, rows), bool), -1)  # after[r, s]: s < r
    from_pre = mm.row_sums(d.qP * s.qP + d.kP * s.kP)  # [..., C, 1]
    from_suf = mm.row_sums(d.ks * s.ks)
    spans = masked(mm.exact("tr,...ts->...rs", upto, from_scores), after)  # sums over t >= r, kept where s < r
    return (
        mm.row_sums(spans)[..., 0]
        + mm.exact("tr,...ti->...r", upto, from_pre)
        + mm.exact("rs,...si->...r", after.astype(np.dtype(dtype)), from_suf)
        + jnp.sum(d.total, -1)[..., None]
    )


def _triangles(rows: int) -> tuple[np.ndarray, np.ndarray]:
    """(on and below the diagonal, below it)."""
    ones = np.ones((rows, rows), bool)
    return np.tril(ones), np.tril(ones, -1)
