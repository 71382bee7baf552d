"""Gradients of query, key and gate of a chunk with one decay per head and row, or none, from states and adjoints.

With U = beta E the rows that were written, dR = dv, S the state before the chunk and dS the adjoint after it:

    dN = do U^T,  dM = -dR U^T         the adjoints of the scores of queries and of keys with keys, times D below
    dq = dN k + pre (do S^T)
    dk = dN^T q + (dM + dM^T) k - pre (dR S^T) + suf (U dS^T)
"""

from __future__ import annotations

import triton
import triton.language as tl

from ejkernel.kernels._triton.gated_delta_rule.kernels.correction import load_per_head
from ejkernel.kernels._triton.linear.kernels.head_decays import decay_matrix, head_decays, not_reset
from ejkernel.kernels._triton.linear.kernels.head_gate import sum_before
from ejkernel.kernels._triton.linear.kernels.tiles import (
    chunk_at,
    dot,
    load_rows,
    load_state,
    onwards,
    program_at,
    store_rows,
    sums,
)


@triton.jit
def _spanning(G, C: tl.constexpr):
    """[C]: for each row r the sum of G[t, s] over s < r <= t: of all scores that the decay of row r is a factor of."""
    t = tl.arange(0, C)[:, None]
    u = tl.arange(0, C)[None, :]
    from_row = sums(onwards(C), tl.where(t > u, G, 0.0), 3)  # over t >= r
    return tl.sum(tl.where(u < t, from_row, 0.0), 1)


@triton.jit
def delta_head_gradients(
    q, k, beta, gs, do, dv, errors, starts, ends, chunks, scale, T, NT,
    dq, dk, dg,
    H: tl.constexpr, HK: tl.constexpr, HGS: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr,
    C: tl.constexpr, SIGN: tl.constexpr, EVEN: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Programs: chunks * heads. dq, dk [tokens, H, K]; dg [tokens, H] (None without a gate).

    do, dv, errors [tokens, H, V]; starts, ends [chunks, H, K, V]: S before, dS after each. gs: as `head_decays` reads it.
    """
    _, head, s = program_at(1, H)
    kv = head // (H // HK)
    token, rows, seq = chunk_at(chunks, s, T, NT, C, SIGN)
    if rows <= 0:
        return
    index = s.to(tl.int64) * H + head
    t = tl.arange(0, C)[:, None]
    u = tl.arange(0, C)[None, :]
    bb = load_per_head(beta, token, rows, head, H, C, SIGN)
    dN = tl.zeros([C, C], tl.float32)
    dM = tl.zeros([C, C], tl.float32)
    ONE: tl.constexpr = V <= BV  # then rows of value channels are read once, and stay in shared memory
    for c in tl.static_range(0, V, BV):
        bd = load_rows(do, token, rows, head, c, H, V, C, BV, SIGN, EVEN)  # [C, BV]
        br = load_rows(dv, token, rows, head, c, H, V, C, BV, SIGN, EVEN)
        be = load_rows(errors, token, rows, head, c, H, V, C, BV, SIGN, EVEN)
        dN = dot(bd, tl.trans(be.to(DT)), dN, DT, PREC)
        dM = dot(br, tl.trans(be.to(DT)), dM, DT, PREC)
    dN *= bb[None, :]  # beta is a factor of rows of U, so of what comes out of products with E
    dM *= bb[None, :]
    if gs is not None:
        logs, pre, suf, kept = head_decays(gs, None, 0.0, index, token, rows, seq, head, H, HGS, C, SIGN, EXACT)
        D = decay_matrix(gs, logs, 0.0, False, C, EXACT)
        dN *= D
        dM *= D
        pre = pre[:, None]
        suf = suf[:, None]
    itself = tl.sum(tl.where(t == u, dN, 0.0), 1)[:, None] * scale  # [C, 1]: scores of a row with itself, which nothing decays
    dN = tl.where(t > u, dN * scale, 0.0)
    dM = tl.where(t > u, -dM, 0.0)
    if EXACT and gs is not None:
        qk = tl.zeros([C, C], tl.float32)
        kk = tl.zeros([C, C], tl.float32)
        for a in range(0, K, BK):
            bq = load_rows(q, token, rows, kv, a, HK, K, C, BK, SIGN, EVEN)  # [C, BK]
            bk = load_rows(k, token, rows, kv, a, HK, K, C, BK, SIGN, EVEN)
            qk = dot(bq, tl.trans(bk.to(DT)), qk, DT, PREC)
            kk = dot(bk, tl.trans(bk.to(DT)), kk, DT, PREC)
        of_scores = _spanning(dN * qk + dM * kk, C)
    dN = dN.to(DT)
    dM = dM.to(DT)
    balance = tl.zeros([C], tl.float32)
    at_suffix = tl.zeros([C], tl.float32)
    through = 0.0
    for a in range(0, K, BK):
        xq = tl.zeros([C, BK], tl.float32)
        xp = tl.zeros([C, BK], tl.float32)
        xs = tl.zeros([C, BK], tl.float32)
        bq = load_rows(q, token, rows, kv, a, HK, K, C, BK, SIGN, EVEN)  # [C, BK]
        bk = load_rows(k, token, rows, kv, a, HK, K, C, BK, SIGN, EVEN)
        for c in tl.static_range(0, V, BV):
            if not ONE:
                bd = load_rows(do, token, rows, head, c, H, V, C, BV, SIGN, EVEN)  # [C, BV]
                br = load_rows(dv, token, rows, head, c, H, V, C, BV, SIGN, EVEN)
                be = load_rows(errors, token, rows, head, c, H, V, C, BV, SIGN, EVEN)
            S = load_state(starts, index, a, c, K, V, V, 1, BK, BV)  # [BK, BV]
            dS = load_state(ends, index, a, c, K, V, V, 1, BK, BV)
            xq = dot(bd, tl.trans(S.to(DT)), xq, DT, PREC)
            xp = dot(br, tl.trans(S.to(DT)), xp, DT, PREC)
            xs = dot(be, tl.trans(dS.to(DT)), xs, DT, PREC)
            if gs is not None:
                through += tl.sum(tl.sum(S.to(tl.float32) * dS.to(tl.float32), 1), 0)
        fq = bq.to(tl.float32)
        fk = bk.to(tl.float32)
        xq *= scale
        xs *= bb[:, None]
        if gs is not None:
            xq *= pre
            xp *= pre
            xs *= suf
            at_suffix += tl.sum(xs * fk, 1)
            if EXACT:
                balance += tl.sum(xq * fq - xp * fk, 1)
        xq = dot(dN, bk, xq, DT, PREC)
        store_rows(dq, xq + itself * fk, token, rows, head, a, H, K, C, BK, SIGN, EVEN)
        later = dot(dM, bk, -xp, DT, PREC)  # what a key reads of the state and of the keys before it
        sooner = dot(tl.trans(dM), bk, dot(tl.trans(dN), bq, None, DT, PREC), DT, PREC)  # what others read of it
        if gs is not None:
            if not EXACT:
                balance += tl.sum(xq * fq + (later - sooner) * fk, 1)
        store_rows(dk, later + sooner + xs + itself * fq, token, rows, head, a, H, K, C, BK, SIGN, EVEN)
    if gs is not None:
        # As in `head_gate_backward`: a score counts at the row that reads and, negative, at the row that is read.
        kept_before, _ = tl.associative_scan((tl.zeros([C], tl.float32), at_suffix), 0, sum_before)
        dlog = tl.cumsum(balance, 0, reverse=True) + kept_before + through * kept
        if EXACT:
            dlog += of_scores
        else:
            dlog = tl.where(not_reset(gs, index, C), dlog, 0.0)
        r = tl.arange(0, C)
        tl.store(dg + (token + SIGN * r) * H + head, dlog, mask=r < rows)
