"""The delta rule step by step in one launch: for decoding, where T is one or a few.

    h' = D_t(h_{t-1});   e_t = v_t - k_t h';   h_t = h' + beta_t k_t^T e_t;   o_t = scale q_t h_t

A program holds a tile [K, BV] of one sequence's and head's state, so every state is read and written once.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ejkernel.kernels._triton.linear.kernels.decode_step import first_step, row_at
from ejkernel.kernels._triton.linear.kernels.tiles import program_at


@triton.jit
def delta_steps(
    q, k, v, beta, gs, gk, begin, cu_seqlens, scale, T,
    o, final,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    """Programs: value tiles * sequences * heads; BK >= K. final may share begin's memory."""
    tile, head, unit = program_at((V + BV - 1) // BV, H)
    seq = unit.to(tl.int64)
    a, b, at, inside, S, token, count = first_step(begin, cu_seqlens, tile, head, seq, T, H, K, V, BK, BV, SIGN)
    for _ in range(count):
        bq = row_at(q, token, head // (H // HK), a, HK, K) * scale  # [BK]
        bk = row_at(k, token, head // (H // HK), a, HK, K)  # [BK]
        bv = row_at(v, token, head, b, H, V)  # [BV]
        bb = tl.load(beta + token * H + head).to(tl.float32)
        if gs is not None:
            S *= tl.exp(tl.load(gs + token * H + head).to(tl.float32))
        if gk is not None:
            S *= tl.exp(row_at(gk, token, head, a, H, K))[:, None]
        error = bv - tl.sum(bk[:, None] * S, 0)  # [BV]
        S += bk[:, None] * (bb * error)[None, :]
        bo = tl.sum(bq[:, None] * S, 0)  # [BV]
        tl.store(o + (token * H + head) * V + b, bo.to(o.dtype.element_ty), mask=b < V)
        token += SIGN
    tl.store(final + at, S, mask=inside, eviction_policy="evict_first")
