"""Gradients of query, key and a gate per key channel, in weakly gated chunks of 64 rows, bfloat16: see `weak_chunks`.

As `delta_head_gradients`, with the decay between two rows divided in the middle of the chunk. Keys are read twice, by queries
and by keys, so there are two adjoints of scores, which `delta_score_adjoints` makes for all tiles of key channels, and three of
rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ejkernel.kernels._triton.gated_delta_rule.kernels.correction import load_per_head
from ejkernel.kernels._triton.linear.kernels.tiles import (
    channel_log_decay,
    chunk_at,
    dot,
    exp2_of_log,
    load_rows,
    load_state,
    onwards,
    program_at,
    store_rows,
    sums,
)
from ejkernel.kernels._triton.linear.kernels.weak_chunks import from_middle


@triton.jit
def delta_score_adjoints(
    do, dv, errors, beta, weak, chunks, scale, T, NT,
    dN, dM,
    H: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, SIGN: tl.constexpr, EVEN: tl.constexpr, PREC: tl.constexpr,
):  # fmt: skip
    """Programs: chunks * heads. The adjoints of the scores of queries with keys, for s <= t, and of keys with keys, for s < t:
    scale * do U^T and -dv U^T, [chunks, H, 64, 64], in chunks that are `weak` [chunks, H]."""
    C: tl.constexpr = 64
    DT: tl.constexpr = dN.dtype.element_ty
    _, head, s = program_at(1, H)
    token, rows, _ = chunk_at(chunks, s, T, NT, C, SIGN)
    index = s.to(tl.int64) * H + head
    if rows <= 0:
        return
    if tl.load(weak + index) == 0:
        return
    t = tl.arange(0, C)[:, None]
    u = tl.arange(0, C)[None, :]
    N = tl.zeros([C, C], tl.float32)
    M = tl.zeros([C, C], tl.float32)
    for c in range(0, V, BV):
        bd = load_rows(do, token, rows, head, c, H, V, C, BV, SIGN, EVEN)  # [C, BV]
        br = load_rows(dv, token, rows, head, c, H, V, C, BV, SIGN, EVEN)
        be = tl.trans(load_rows(errors, token, rows, head, c, H, V, C, BV, SIGN, EVEN))
        N = dot(bd, be, N, DT, PREC)
        M = dot(br, be, M, DT, PREC)
    b = load_per_head(beta, token, rows, head, H, C, SIGN)[None, :]  # of U = beta E: a factor of what the products give
    at = index * (C * C) + (t * C + u)
    N = tl.where(t >= u, N * (b * scale), 0.0)
    tl.store(dN + at, N.to(DT))
    M = tl.where(t > u, M * -b, 0.0)
    tl.store(dM + at, M.to(DT))


@triton.jit
def delta_weak_gradients(
    q, k, g, beta, do, dv, errors, dN, dM, starts, ends, weak, chunks, scale, T, NT,
    dq, dk, dg,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    SIGN: tl.constexpr, EVEN: tl.constexpr, PREC: tl.constexpr, GATE_PARTS: tl.constexpr,
):  # fmt: skip
    """Programs: tiles of BK key channels * chunks * heads. dq, dk, dg [tokens, H, K] in chunks that are `weak` [chunks, H].

    do, dv, errors [tokens, H, V]; dN, dM: of `delta_score_adjoints`; starts, ends [chunks, H, K, V]: state before, adjoint
    after each chunk.
    """
    C: tl.constexpr = 64
    DT: tl.constexpr = starts.dtype.element_ty
    TILES: tl.constexpr = (K + BK - 1) // BK
    tile, head, s = program_at(TILES, H)
    col = tile * BK
    token, rows, seq = chunk_at(chunks, s, T, NT, C, SIGN)
    index = s.to(tl.int64) * H + head
    if rows <= 0:
        return
    if tl.load(weak + index) == 0:
        return
    r = tl.arange(0, C)
    aq = tl.zeros([C, BK], tl.float32)  # adjoint of q exp(c - m): from the state before the chunk, then from the scores
    ar = tl.zeros([C, BK], tl.float32)  # adjoint of k exp(c - m)
    ak = tl.zeros([C, BK], tl.float32)  # adjoint of k exp(m - c)
    through = tl.zeros([BK], tl.float32)
    for c2 in range(0, V, BV):
        bd = load_rows(do, token, rows, head, c2, H, V, C, BV, SIGN, EVEN)  # [C, BV]
        br = load_rows(dv, token, rows, head, c2, H, V, C, BV, SIGN, EVEN)
        be = load_rows(errors, token, rows, head, c2, H, V, C, BV, SIGN, EVEN)
        S = load_state(starts, index, col, c2, K, V, V, 1, BK, BV)  # [BK, BV]
        dS = load_state(ends, index, col, c2, K, V, V, 1, BK, BV)
        aq = dot(bd, tl.trans(S), aq, DT, PREC)
        ar = dot(br, tl.trans(S), ar, DT, PREC)
        ak = dot(be, tl.trans(dS), ak, DT, PREC)
        through += tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1)
    c, half = from_middle(
        channel_log_decay(g, None, None, token, rows, seq, head, col, False, H, H, 1, K, C, BK, SIGN, EVEN), GATE_PARTS
    )  # [C, BK], [BK]
    bk = load_rows(k, token, rows, head // (H // HK), col, HK, K, C, BK, SIGN, EVEN).to(tl.float32)
    fk = (bk * exp2_of_log(-c)).to(DT)
    fr = (bk * exp2_of_log(c)).to(DT)
    bq = load_rows(q, token, rows, head // (H // HK), col, HK, K, C, BK, SIGN, EVEN).to(tl.float32)
    fq = (bq * exp2_of_log(c)).to(DT)
    aq *= (half * scale)[None, :]
    ar *= -half[None, :]
    ak *= load_per_head(beta, token, rows, head, H, C, SIGN)[:, None] * half[None, :]
    everything = through * half * half + tl.sum(fk.to(tl.float32) * ak, 0)
    at = index * (C * C) + (r[:, None] * C + r[None, :])
    scores = tl.load(dN + at)
    aq = dot(scores, fk, aq, DT, PREC)
    store_rows(dq, exp2_of_log(c) * aq, token, rows, head, col, H, K, C, BK, SIGN, EVEN)
    ak = dot(tl.trans(scores), fq, ak, DT, PREC)
    scores = tl.load(dM + at)
    ar = dot(scores, fk, ar, DT, PREC)
    ak = dot(tl.trans(scores), fr, ak, DT, PREC)
    store_rows(dk, exp2_of_log(c) * ar + exp2_of_log(-c) * ak, token, rows, head, col, H, K, C, BK, SIGN, EVEN)
    # As in `weak_axis`, but with the rows as they were rounded for the products: so a pair of rows counts at both by the very
    # same product, and nothing is left of it in rows before both.
    found = fq.to(tl.float32) * aq + fr.to(tl.float32) * ar - fk.to(tl.float32) * ak
    found = sums(onwards(C), found, 2) + everything[None, :]
    store_rows(dg, found, token, rows, head, col, H, K, C, BK, SIGN, EVEN)
