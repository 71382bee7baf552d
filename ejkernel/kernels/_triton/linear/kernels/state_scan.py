"""The state before every chunk, or its adjoint after it, from rows as they came: any gates, dtypes and chunks.

    forward:  S' = D_k S D_v + (k suf_k)^T (v suf_v)              kept: S before every chunk
    adjoint:  dS' = D_k dS D_v + (scale q pre_k)^T (do pre_v)     kept: dS after every chunk, going back in time

D: the chunk's decay; pre: product of the decays up to and including a row; suf: product of those of the rows after it. Both are
one kernel over two arrays (a, b): (k, v) or (q, do), with a tile [BA, BB] of the state in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ejkernel.kernels._triton.linear.kernels.head_decays import constant_decay, head_decays
from ejkernel.kernels._triton.linear.kernels.segments import (
    chunk_in_turn,
    ends_sequence,
    rows_of_segment,
    scanned_segment,
    state_at_start,
)
from ejkernel.kernels._triton.linear.kernels.tiles import (
    after,
    before,
    channel_log_decay,
    dot,
    load_rows,
    onwards,
    program_at,
    store_state,
    sums,
    sums_of_columns,
    upto,
)


@triton.jit
def _first_that_counts(constant, count, C: tl.constexpr):
    """The first of `count` chunks in turn that leaves anything in the state after the last one, where every step decays alike.

    A state holds no number above exp(88.8), and what is below exp(-103.9) is rounded to 0: so exp(-193) times any is. The chunk
    where the sequence ends, which may be short, is not relied on. Of chunks that decay by less than 1e-7, or not at all, more
    are needed than a call can have; their number still is an int32.
    """
    needed = (193.0 / tl.maximum(constant * -C, 1e-7)).to(tl.int32) + 2
    return tl.maximum(count - needed, 0)


@triton.jit
def state_scan(
    xa, xb, ga, gb, gs, gamma, begin, ends, end_decay_a, end_decay_b, chunks, segments, scale, T, NT, NS, SC,
    states, final, segment_decay_a, segment_decay_b,
    H: tl.constexpr, HA: tl.constexpr, HB: tl.constexpr, HGA: tl.constexpr, HGB: tl.constexpr, HGS: tl.constexpr,
    DA: tl.constexpr, DB: tl.constexpr, BA: tl.constexpr, BB: tl.constexpr, C: tl.constexpr, SIGN: tl.constexpr,
    EVEN: tl.constexpr, ADJOINT: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr, GATE_PARTS: tl.constexpr,
    EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs: tiles of a * tiles of b * segments * heads.

    states [chunks, H, DA, DB] may be None; final is [N, H, DA, DB], or, with segment_decay_a given, each segment's own end.
    gs: g, or, where not EXACT and without gates per channel, its running sums.
    """
    TA: tl.constexpr = (DA + BA - 1) // BA
    TB: tl.constexpr = (DB + BB - 1) // BB
    ENDS_ONLY: tl.constexpr = segment_decay_a is not None
    SCALAR: tl.constexpr = (ga is None) and (gb is None) and ((gs is not None) or (gamma is not None))
    tile, head, unit = program_at(TA * TB, H)
    b = (tile % TB) * BB
    a = (tile // TB) * BA
    segment, idle = scanned_segment(segments, unit, NT, NS, SC, ADJOINT, ENDS_ONLY)
    if idle:
        return
    last = ends_sequence(segment, ADJOINT)
    g, first, count, seq, _place, _total = segment
    i = a + tl.arange(0, BA)
    j = b + tl.arange(0, BB)
    kept_a = tl.full([BA], 1.0, tl.float32)
    kept_b = tl.full([BB], 1.0, tl.float32)
    constant = constant_decay(gamma, seq, head, H)
    S = state_at_start(begin, ends, end_decay_a, end_decay_b, segment, head, a, b, ADJOINT, H, DA, DB, DB, 1, BA, BB, 0)
    token0, rows_left = rows_of_segment(chunks, first, count, T, NT, C, SIGN)
    begin_at = 0
    if ENDS_ONLY and SCALAR and gs is None:
        begin_at = _first_that_counts(constant, count, C)
        kept_a = tl.where(begin_at > 0, 0.0, kept_a)  # what all chunks together decay by, then
    for n in tl.range(begin_at, count, num_stages=STAGES):
        s, token, rows = chunk_in_turn(first, count, token0, rows_left, n, ADJOINT, C, SIGN)
        index = s.to(tl.int64) * H + head
        if not ENDS_ONLY:
            store_state(states, S, index, a, b, DA, DB, BA, BB)
        va = load_rows(xa, token, rows, head // (H // HA), a, HA, DA, C, BA, SIGN, EVEN)  # [C, BA]
        vb = load_rows(xb, token, rows, head // (H // HB), b, HB, DB, C, BB, SIGN, EVEN)  # [C, BB]
        if ga is not None:
            # Transposed, [BA, C]: what is computed is then the left, register operand of the product below.
            la = tl.trans(channel_log_decay(ga, gs, gamma, token, rows, seq, head, a, True, H, HGA, HGS, DA, C, BA, SIGN, EVEN))
            chunk_decay_a = tl.exp(tl.sum(la, 1))
            if ADJOINT:
                left = tl.trans(va).to(tl.float32) * (scale * tl.exp(sums_of_columns(la, onwards(C), GATE_PARTS)))
            else:
                left = tl.trans(va).to(tl.float32) * tl.exp(sums_of_columns(la, before(C), GATE_PARTS))
            S = S * chunk_decay_a[:, None]
            if ENDS_ONLY:
                kept_a *= chunk_decay_a
        else:
            left = tl.trans(va.to(DT))
            if ADJOINT:
                vb = vb.to(tl.float32) * scale
        if gb is not None:
            lb = channel_log_decay(gb, gs, gamma, token, rows, seq, head, b, ga is None, H, HGB, HGS, DB, C, BB, SIGN, EVEN)
            chunk_decay_b = tl.exp(tl.sum(lb, 0))
            if ADJOINT:
                vb = vb.to(tl.float32) * tl.exp(sums(upto(C), lb, GATE_PARTS))
            else:
                vb = vb.to(tl.float32) * tl.exp(sums(after(C), lb, GATE_PARTS))
            S = S * chunk_decay_b[None, :]
            if ENDS_ONLY:
                kept_b *= chunk_decay_b
        if SCALAR:
            _, pre, suf, chunk_decay = head_decays(gs, gamma, constant, index, token, rows, seq, head, H, HGS, C, SIGN, EXACT)
            factor = suf
            if ADJOINT:
                factor = pre
            vb = vb.to(tl.float32) * factor[:, None]
            S = S * chunk_decay
            if ENDS_ONLY:
                kept_a *= chunk_decay
        S = dot(left, vb, S, DT, PREC)
    if ENDS_ONLY:
        segment = g.to(tl.int64) * H + head
        store_state(final, S, segment, a, b, DA, DB, BA, BB)
        if b == 0:
            tl.store(segment_decay_a + segment * DA + i, kept_a, mask=i < DA)
        if segment_decay_b is not None:
            if a == 0:
                tl.store(segment_decay_b + segment * DB + j, kept_b, mask=j < DB)
    else:
        if last:
            store_state(final, S, seq.to(tl.int64) * H + head, a, b, DA, DB, BA, BB)
