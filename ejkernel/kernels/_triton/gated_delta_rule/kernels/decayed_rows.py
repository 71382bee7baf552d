"""Rows times their decays per key channel, of any dtype and chunk: what the scans of the delta rule read of query and key."""

from __future__ import annotations

import triton
import triton.language as tl

from ejkernel.kernels._triton.linear.kernels.tiles import (
    after,
    channel_log_decay,
    chunk_at,
    load_rows,
    program_at,
    sums,
    upto,
)


@triton.jit
def decayed_rows(
    q, k, g, chunks, scale, T, NT,
    qd, kp, kd, chunk_decay,
    H: tl.constexpr, HK: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
    SIGN: tl.constexpr, EVEN: tl.constexpr, GATE_PARTS: tl.constexpr,
):  # fmt: skip
    """Programs: tiles of BK key channels * chunks * heads. qd, kp: scale * q and k times the decays up to and with each row;
    kd: k times the decays after it, all [chunks, H, C, KP]; chunk_decay [chunks, H, KP]."""
    tile, head, s = program_at((KP + BK - 1) // BK, H)
    col = tile * BK
    token, rows, seq = chunk_at(chunks, s, T, NT, C, SIGN)
    if rows <= 0:
        return
    index = s.to(tl.int64) * H + head
    logs = channel_log_decay(g, None, None, token, rows, seq, head, col, False, H, H, 1, K, C, BK, SIGN, EVEN, KP)  # [C, BK]
    up_to_row = tl.exp(sums(upto(C), logs, GATE_PARTS))
    after_row = tl.exp(sums(after(C), logs, GATE_PARTS))
    bq = load_rows(q, token, rows, head // (H // HK), col, HK, K, C, BK, SIGN, EVEN, KP).to(tl.float32)
    bk = load_rows(k, token, rows, head // (H // HK), col, HK, K, C, BK, SIGN, EVEN, KP).to(tl.float32)
    at = index * (C * KP) + (tl.arange(0, C)[:, None] * KP + (col + tl.arange(0, BK))[None, :])
    tl.store(qd + at, (bq * up_to_row * scale).to(qd.dtype.element_ty))
    tl.store(kp + at, (bk * up_to_row).to(kp.dtype.element_ty))
    tl.store(kd + at, (bk * after_row).to(kd.dtype.element_ty))
    tl.store(chunk_decay + index * KP + col + tl.arange(0, BK), tl.exp(tl.sum(logs, 0)))
