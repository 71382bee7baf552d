"""How the rows of a chunk correct each other's errors: the one part of the delta rule that linear attention does not have.

With M[t, s] = k_t . k_s times the decay from s to t, for s < t, the errors E of a chunk are those against the state before it,
R, less what the rows before each have written: E = R - M (beta E). Hence

    E = R - Z (beta R),   Z = (I + M beta)^-1 M

Z is strictly lower triangular, so a row's own R is never rounded by the product, and nothing is divided by beta. Going back in
time the adjoints obey the same with Z^T.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ejkernel.kernels._triton.linear.kernels.head_decays import decay_matrix, head_decays
from ejkernel.kernels._triton.linear.kernels.tiles import chunk_at, dot, load_rows, program_at


@triton.jit
def load_per_head(x, token, rows, head, H: tl.constexpr, C: tl.constexpr, SIGN: tl.constexpr):
    """[C] in float32: a chunk's rows of x [tokens, H] in one head; 0 outside."""
    r = tl.arange(0, C)
    return tl.load(x + (token + SIGN * r) * H + head, mask=r < rows, other=0.0).to(tl.float32)


@triton.jit
def _inverse(W, LEVELS: tl.constexpr, C: tl.constexpr, PREC: tl.constexpr):
    """(I + W)^-1 for W [C, C] strictly lower triangular, by doubling blocks: [[X1, 0], [-X2 W21 X1, X2]].

    A sum of powers of W, the usual way, loses every digit where keys are alike and beta is near 2.
    """
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    apart = t ^ s
    X = tl.where(t == s, 1.0, 0.0) - tl.where(apart == 1, W, 0.0)
    for level in tl.static_range(1, LEVELS):
        met = tl.where((apart >> level) == 1, W, 0.0)
        X -= dot(X, dot(met, X, None, tl.float32, PREC), None, tl.float32, PREC)
    return X


@triton.jit
def delta_correction(
    k, gs, beta, M, M_low, chunks, T, NT,
    Z,
    H: tl.constexpr, HK: tl.constexpr, HGS: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
    LEVELS: tl.constexpr, SIGN: tl.constexpr, EVEN: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Programs: chunks * heads. Z [chunks, H, C, C].

    M, M_low [chunks, H, C, C]: the scores of keys with keys and, where it matters, their low part; None with one gate per head
    or none, where they are made here. gs: as `head_decays` reads it. C is 2^LEVELS.
    """
    _, head, s = program_at(1, H)
    token, rows, seq = chunk_at(chunks, s, T, NT, C, SIGN)
    if rows <= 0:
        return
    index = s.to(tl.int64) * H + head
    t = tl.arange(0, C)[:, None]
    u = tl.arange(0, C)[None, :]
    at = index * (C * C) + (t * C + u)
    if M is not None:
        scores = tl.load(M + at).to(tl.float32)
        if M_low is not None:
            scores += tl.load(M_low + at).to(tl.float32)
    else:
        scores = tl.zeros([C, C], tl.float32)
        for c in range(0, K, BK):
            bk = load_rows(k, token, rows, head // (H // HK), c, HK, K, C, BK, SIGN, EVEN)  # [C, BK]
            scores = dot(bk, tl.trans(bk.to(DT)), scores, DT, PREC)
        if gs is not None:
            logs, _, _, _ = head_decays(gs, None, 0.0, index, token, rows, seq, head, H, HGS, C, SIGN, EXACT)
            scores *= decay_matrix(gs, logs, 0.0, False, C, EXACT)
    scores = tl.where(t > u, scores, 0.0)
    b = load_per_head(beta, token, rows, head, H, C, SIGN)
    X = _inverse(scores * b[None, :], LEVELS, C, PREC)
    tl.store(Z + at, dot(X, scores, None, tl.float32, PREC).to(Z.dtype.element_ty))
