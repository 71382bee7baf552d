"""M chunks side by side whose decay is one number per row (g of rank 3, g_gamma) or absent: forward and backward.

    S' = w_C S + (k * suf)^T v                          w_C: product of the chunk's decays
    o  = ((q k^T) * D) v + pre * (q S)                  D[t, s]: product of the decays after s up to t; 0 for s > t

D [C, C] comes from the same dyadic tree as the gates per channel, but it is one matrix for the head, so the tree costs
C^2 log C elementwise steps and all products are over whole chunks.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels._xla.linear._products import Array, Matmul, aligned, halves, levels, pass_on


class Decay(NamedTuple):
    """What a chunk needs of its scalar decays; all but `matrix` are None without a gate."""

    matrix: Array  # [..., C, C]: lower triangular, ones on the diagonal
    pre: Array | None = None  # [..., C, 1]
    suf: Array | None = None  # [..., C, 1]

    def total(self) -> Array | None:
        return None if self.pre is None else self.pre[..., -1:, :]  # [..., 1, 1]


class ScalarGrads(NamedTuple):
    """Gradients of the chunks' rows; `dw` is with respect to the logarithm of the decays."""

    dq: Array  # [..., C, K]
    dk: Array  # [..., C, K]
    dv: Array  # [..., C, V]
    dw: Array | None  # [..., C]


def decay_of(w: Array | None, q: Array) -> Decay:
    """Everything from the decays `[..., C]` themselves, for rows `q [..., C, K]`; w=None is no gate."""
    rows = q.shape[-2]
    if w is None:
        return Decay(aligned(np.tril(np.ones((rows, rows))), q))
    blocks = jnp.ones((*w.shape, 1, 1), w.dtype)  # [..., C/h, h, h]: D inside blocks of h rows, from h = 1 on
    for h, all_pre, all_suf in levels(w[..., None], rows):
        if h == rows:
            break
        assert all_pre is not None
        assert all_suf is not None
        (_, pre), (suf, _) = halves(all_pre, h), halves(all_suf, h)  # [..., C/2h, h, 1]
        left, right = blocks[..., 0::2, :, :], blocks[..., 1::2, :, :]  # [..., C/2h, h, h]
        upper = jnp.concatenate([left, jnp.zeros_like(left)], -1)
        lower = jnp.concatenate([pre * jnp.swapaxes(suf, -1, -2), right], -1)
        blocks = jnp.concatenate([upper, lower], -2)
    # The barrier keeps XLA from computing the matrix again in each of its uses.
    return Decay(*lax.optimization_barrier((blocks[..., 0, :, :], all_pre, all_suf)))


def _scaled(x: Array, factor: Array | None) -> Array:
    return x if factor is None else x * factor


def forward(mm: Matmul, S: Array, q: Array, k: Array, v: Array, w: Array | None) -> tuple[Array, Array]:
    """(state after the chunks `[..., K, V]`, output `[..., M, C, V]`); rows `[..., M, C, D]`; w: decays `[..., M, C]`, None."""
    decay = decay_of(w, q)
    entering, S = pass_on(S, mm.tn(_scaled(k, decay.suf), v), [decay.total()])
    scores = mm.nt(q, k) * decay.matrix  # [..., M, C, C]
    return S, mm.nn(scores, v) + _scaled(mm.nn(q, entering), decay.pre)


def backward(
    mm: Matmul, S: Array, dS: Array, q: Array, k: Array, v: Array, w: Array | None, do: Array
) -> tuple[Array, ScalarGrads]:
    """(adjoint of the state before the chunks, gradients of their rows) from those of the state after them and the output."""
    rows = q.shape[-2]
    decay = decay_of(w, q)
    Ss, _ = pass_on(S, mm.tn(_scaled(k, decay.suf), v), [decay.total()])
    dSs, dS = pass_on(dS, mm.tn(_scaled(q, decay.pre), do), [decay.total()], backwards=True)
    raw_scores = mm.nt(q, k)  # [..., C, C]
    A = raw_scores * decay.matrix
    dA = mm.nt(do, v) * decay.matrix
    dx, dy = mm.nt(do, Ss), mm.nt(v, dSs)  # [..., C, K] adjoints of q pre and k suf, before their factors
    dq = mm.nn(dA, k) + _scaled(dx, decay.pre)
    dk = mm.tn(dA, q) + _scaled(dy, decay.suf)
    dv = mm.tn(A, do) + _scaled(mm.nn(k, dSs), decay.suf)
    dw = None
    if decay.pre is not None:
        # The decay of row r is a factor of every D[t, s] with s < r <= t, of pre[t] with t >= r and of suf[s] with s < r.
        from_scores = raw_scores * dA  # [..., C, C]
        upto = np.tril(np.ones((rows, rows), np.float32))  # upto[t, r]: r <= t
        after = np.tril(np.ones((rows, rows), np.float32), -1)  # after[r, s]: s < r
        from_pre = mm.row_sums(dx * q) * decay.pre  # [..., C, 1]
        from_suf = _scaled(mm.row_sums(dy * k), decay.suf)
        through = jnp.sum(mm.row_sums(Ss * dSs), -2) * decay.pre[..., -1, :]  # [..., 1]
        spans = mm.exact("tr,...ts->...rs", upto, from_scores)  # sums over t >= r
        spans = spans * aligned(after, spans)  # kept where s < r
        dw = (
            jnp.sum(spans, -1)
            + mm.exact("tr,...ti->...r", upto, from_pre)
            + mm.exact("rs,...si->...r", after, from_suf)
            + through
        )
    return dS, ScalarGrads(dq, dk, dv, dw)
