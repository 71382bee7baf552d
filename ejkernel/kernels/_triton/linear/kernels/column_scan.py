"""`head_gate_scan` for weakly gated segments, with the state held transposed and no matrix of decays.

With c the running sum of a chunk's log decays and w its last one:

    S1 = exp(w) S + k^T (exp(w - c) v)          o = scale exp(c - w) ((q k^T exp(w - c)) v + q (exp(w) S))

The decay of a score is a factor of its row and one of its column. Both are in float32's range where the chunk is weakly gated.
The state is [value channels, key channels] and with the values a left operand, which the tensor cores take from registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ejkernel.kernels._triton.linear.kernels.head_decays import constant_decay, weak_segment
from ejkernel.kernels._triton.linear.kernels.segments import (
    chunk_in_turn,
    ends_sequence,
    rows_of_segment,
    scanned_segment,
    state_at_start,
)
from ejkernel.kernels._triton.linear.kernels.tiles import dot, exp_of_log, load_rows, program_at, store_rows, store_state


@triton.jit
def _row_decays(gs, constant, index, rows, scale, ADJOINT: tl.constexpr, C: tl.constexpr):
    """What rows are multiplied with on their way into the state and into outputs, [C] each, and the chunk's decay.

    gs: what `running_log_decays` made, or None for g_gamma. ADJOINT: the state holds scale times what it sums, since its
    beginning does.
    """
    r = tl.arange(0, C)
    if gs is None:
        c = tl.minimum(r + 1, rows) * constant
        whole = rows * constant
    else:
        c = tl.load(gs + index * C + r)
        whole = tl.load(gs + index * C + (C - 1))
    if ADJOINT:
        enters = exp_of_log(c) * scale
        leaves = exp_of_log(-c)
    else:
        enters = exp_of_log(whole - c)
        leaves = exp_of_log(c - whole) * scale
    return enters, leaves, tl.exp(whole)  # one number: nothing to save


@triton.jit
def head_gate_column_scan(
    q, k, v, gs, gamma, begin, ends, end_decay, chunks, segments, scale, T, NT, NS, SC,
    o, final, states,
    H: tl.constexpr, HQ: tl.constexpr, HK: tl.constexpr, HV: tl.constexpr, HGS: tl.constexpr, K: tl.constexpr, V: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, STRIDE_K: tl.constexpr, STRIDE_V: tl.constexpr, DECAYS: tl.constexpr,
    C: tl.constexpr, SIGN: tl.constexpr, EVEN: tl.constexpr, ADJOINT: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr,
    EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Arguments and results as of `head_gate_scan`, not EXACT, which is to do the segments that are not weakly gated."""
    tl.static_assert(not EXACT)
    GATED: tl.constexpr = (gs is not None) or (gamma is not None)
    TV: tl.constexpr = (V + BV - 1) // BV
    tile, head, unit = program_at(TV, H)
    b = tile * BV
    segment, idle = scanned_segment(segments, unit, NT, NS, SC, ADJOINT, False)
    if idle:
        return
    _g, first, count, seq, _place, _total = segment
    constant = constant_decay(gamma, seq, head, H)
    if GATED:
        if not weak_segment(gs, constant, first, count, head, H, C):
            return
    S = state_at_start(
        begin, ends, end_decay, None, segment, head, b, 0, ADJOINT, H, V, K, STRIDE_V, STRIDE_K, BV, BK, DECAYS
    )  # [BV, BK]
    row = tl.arange(0, C)[:, None]
    column = tl.arange(0, C)[None, :]
    token0, rows_left = rows_of_segment(chunks, first, count, T, NT, C, SIGN)
    for n in tl.range(count, num_stages=STAGES):
        s, token, rows = chunk_in_turn(first, count, token0, rows_left, n, ADJOINT, C, SIGN)
        index = s.to(tl.int64) * H + head
        bq = load_rows(q, token, rows, head // (H // HQ), 0, HQ, K, C, BK, SIGN, EVEN)  # [C, BK]
        bk = load_rows(k, token, rows, head // (H // HK), 0, HK, K, C, BK, SIGN, EVEN)  # [C, BK]
        bv = tl.trans(load_rows(v, token, rows, head // (H // HV), b, HV, V, C, BV, SIGN, EVEN))  # [BV, C]
        if states is not None:
            store_state(states, tl.trans(S), index, 0, b, K, V, BK, BV)
        A = dot(bk, tl.trans(bq.to(DT)), None, DT, PREC)  # [C, C]: k q^T
        if ADJOINT:
            A = tl.where(row >= column, A, 0.0)
        else:
            A = tl.where(row <= column, A, 0.0)
        passed = bv
        if GATED:
            enters, leaves, kept = _row_decays(gs, constant, index, rows, scale, ADJOINT, C)
            A *= enters[:, None]  # and not of values that are rounded once more
            passed = bv.to(tl.float32) * enters[None, :]
            S *= kept
        elif ADJOINT:
            A *= scale
            passed = bv.to(tl.float32) * scale
        bo = dot(S, tl.trans(bq.to(DT)), None, DT, PREC)  # [BV, C]
        bo = dot(bv, A, bo, DT, PREC)
        if GATED:
            bo *= leaves[None, :]
        elif not ADJOINT:
            bo *= scale
        store_rows(o, tl.trans(bo), token, rows, head, b, H, V, C, BV, SIGN, EVEN)
        S = dot(passed, bk, S, DT, PREC)
    if final is not None:
        if ends_sequence(segment, ADJOINT):
            store_state(final, tl.trans(S), seq.to(tl.int64) * H + head, 0, b, K, V, BK, BV)
