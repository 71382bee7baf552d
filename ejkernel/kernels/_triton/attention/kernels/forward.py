"""The forward pass: an online softmax over tiles of keys.

    new_top = max(top, max(x))          e     = 2^(x - new_top)
    total   = total 2^(top - new_top) + sum(e)
    acc     = acc   2^(top - new_top) + dropped(e) v
    o       = acc / total               lse   = top + log2(total), +inf where nothing is attended to

with e for 2 in EXACT calls, see logits.py.

A program has a tile of one head's queries. For a few queries over many keys (GROUPED) it has the queries of all heads of a
group, whose keys it then reads once, and one of several parts of the keys: `combine_parts` joins them.
A sink is a logit that is there before the first key: it starts `top` and `total`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ejkernel.kernels._triton.attention.kernels.call import Given
from ejkernel.kernels._triton.attention.kernels.logits import (
    LOG2E,
    aligned,
    kept_scores,
    kept_weights,
    load_tile,
    logits,
    masked_tile,
    power,
    program_at,
    visited,
)


@triton.jit
def _logarithm(x, EXACT: tl.constexpr):
    """To the base of the logits."""
    if EXACT:
        return tl.log(x)
    else:
        return tl.log2(x)


@triton.jit
def _attend(
    state, q, k, v, given, n, batch, head, t, MASKED: tl.constexpr, BN: tl.constexpr, CALL: tl.constexpr,
):  # fmt: skip
    """(acc [BM, BDV], top [BM], total [BM]) after the n-th tile of keys."""
    acc, top, total = state
    S = given.S
    row = n * BN
    j = row + tl.arange(0, BN)[None, :]
    CHECK: tl.constexpr = MASKED and CALL.KEYS_DIVIDE % BN != 0
    bk = load_tile(k, row, S, CALL.HK, CALL.D, BN, CALL.BD, CHECK)  # [BN, BD]
    s = tl.dot(q, tl.trans(bk), input_precision=CALL.PREC)  # [BM, BN]
    x, _ = logits(s, given, batch, head, t, j, CALL, MASKED)
    if MASKED:
        x = tl.where(kept_scores(given, batch, head, t, j, row, CALL, False), x, float("-inf"))
    new_top = tl.max(x, 1)
    if CALL.FUSED:
        new_top = new_top * given.factor
    new_top = tl.maximum(top, new_top)
    below = new_top
    if MASKED or given.bias is not None:
        below = tl.where(new_top == float("-inf"), 0.0, new_top)  # -inf - -inf would be NaN where nothing is seen yet
    if CALL.FUSED:
        e = power(x * given.factor - below[:, None], CALL)  # [BM, BN]
    else:
        e = power(x - below[:, None], CALL)
    shrink = power(top - below, CALL)
    total = total * shrink + tl.sum(e, 1)
    if given.words is not None:
        e = tl.where(kept_weights(given, batch, head, t, j, CALL), e, 0.0)
    bv = load_tile(v, row, S, CALL.HK, CALL.DV, BN, CALL.BDV, CHECK)  # [BN, BDV]
    acc = tl.dot(e.to(bv.dtype), bv, acc * shrink[:, None], input_precision=CALL.PREC)
    return acc, new_top, total


@triton.jit
def flash_forward(
    q, k, v, bias, mask, q_segments, kv_segments, q_positions, kv_positions, words, traced_scale, sinks, ranges, scale, cap,
    T, S, ROWS, PARTS,
    o, lse,
    CALL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, RANGES_B: tl.constexpr, RANGES_H: tl.constexpr,
    STAGES: tl.constexpr, GROUPED: tl.constexpr, PARTIAL: tl.constexpr,
):  # fmt: skip
    """Programs: query tiles * heads * batch; GROUPED: tiles of a group's rows * parts * key heads * batch.

    o [B, T, H, DV] and lse [B, H, T], of PARTIAL calls [parts, ...] each, -inf where a part has nothing. ROWS: B * H * T.
    """
    H: tl.constexpr = CALL.H
    HK: tl.constexpr = CALL.HK
    D: tl.constexpr = CALL.D
    DV: tl.constexpr = CALL.DV
    BDV: tl.constexpr = CALL.BDV
    G: tl.constexpr = H // HK
    UNIT: tl.constexpr = 1.0 if CALL.EXACT else LOG2E
    S = aligned(S, CALL)
    part = 0
    if GROUPED:
        tiles = (T * G + BM - 1) // BM
        tile, kv_head, batch = program_at(tiles * PARTS, HK)
        part = tile // tiles
        r = (tile % tiles) * BM + tl.arange(0, BM)
        head = kv_head * G + tl.minimum(r // T, G - 1)[:, None]  # [BM, 1]
        t = tl.where(r < T * G, r % T, T)[:, None]
        turn = visited(ranges, batch, kv_head * G, 0, 0, T, S, 1, BN, CALL, RANGES_B, RANGES_H, False)
    else:
        tiles = (T + BM - 1) // BM
        tile, head, batch = program_at(tiles, H, CALL.SHARED, CALL.TOGETHER)
        tile = tiles - 1 - tile  # causal: the longest first
        kv_head = head // G
        t = tile * BM + tl.arange(0, BM)[:, None]
        rows = tl.minimum(BM, T - tile * BM)
        turn = visited(ranges, batch, head, tile, tile * BM, rows, S, tiles, BN, CALL, RANGES_B, RANGES_H, False)
    first, full_first, full_last, last = turn
    if bias is not None:
        full_last = tl.where(tl.max(t) < T, full_last, full_first)  # rows beyond the last query have no bias to read
    factor = scale * UNIT
    if traced_scale is not None:
        factor = tl.load(traced_scale + batch * CALL.SCALE_VARIES).to(tl.float32) * UNIT
    given = Given(bias, mask, None, q_segments, kv_segments, q_positions, kv_positions, words, factor, cap, T, S)
    c = tl.arange(0, CALL.BD)[None, :]
    row = (batch * T + t) * H + head  # [BM, 1]: of [B, T, H, ...]
    bq = tl.load(q + row * D + c, mask=(t < T) & (c < D), other=0.0)  # [BM, BD]
    if CALL.EXACT:
        bq = bq * factor
    k += (batch * S * HK + kv_head) * D
    v += (batch * S * HK + kv_head) * DV
    top = tl.full([BM], float("-inf"), tl.float32)
    total = tl.zeros([BM], tl.float32)
    if sinks is not None:
        sink = tl.load(sinks + (batch * CALL.SINKS_VARY) * H + head + t * 0).to(tl.float32) * UNIT  # [BM, 1]
        sink = tl.where(part == 0, sink, float("-inf"))
        top = tl.reshape(sink, [BM])
        total = tl.where(top == float("-inf"), 0.0, 1.0)
    state = (tl.zeros([BM, BDV], tl.float32), top, total)
    begin = 0
    full = full_last - full_first
    end = last - first
    if PARTIAL:
        each = (end + PARTS - 1) // PARTS
        begin = part * each
        end = tl.minimum(begin + each, end)
    for n in tl.range(full_first + tl.minimum(begin, full), full_first + tl.minimum(end, full), num_stages=STAGES):
        state = _attend(state, bq, k, v, given, n, batch, head, t, False, BN, CALL)
    for n in tl.range(first + tl.maximum(begin - full, 0), first + tl.maximum(end - full, 0), num_stages=STAGES):
        tile_n = masked_tile(n, full_first, full)
        state = _attend(state, bq, k, v, given, tile_n, batch, head, t, True, BN, CALL)
    acc, top, total = state
    acc = acc * (CALL.SURVIVES / tl.where(total == 0.0, 1.0, total))[:, None]
    empty = float("-inf") if PARTIAL else float("inf")
    sums = tl.where(total == 0.0, empty, top + _logarithm(tl.where(total == 0.0, 1.0, total), CALL.EXACT))  # [BM]
    cv = tl.arange(0, CALL.BDV)[None, :]
    at = batch * 0
    if PARTIAL:
        at += part * ROWS.to(tl.int64)
    tl.store(o + (at + row) * DV + cv, acc.to(o.dtype.element_ty), mask=(t < T) & (cv < DV))
    if lse is not None:
        tl.store(lse + at + (batch * H + head) * T + t, sums[:, None], mask=t < T)


@triton.jit
def combine_parts(
    part_o, part_lse, T, ROWS, PARTS,
    o, lse,
    H: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, R: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Programs: rows of [B, T, H]. part_o [parts, B, T, H, DV] and part_lse [parts, B, H, T] are joined to o and lse."""
    tile, _head, _batch = program_at((ROWS + R - 1) // R, 1)
    row = tile.to(tl.int64) * R + tl.arange(0, R)
    inside = row < ROWS
    head = row % H
    token = row // H
    own = ((token // T) * H + head) * T + token % T  # of [B, H, T]
    at = own
    c = tl.arange(0, BDV)[None, :]
    acc = tl.zeros([R, BDV], tl.float32)
    top = tl.full([R], float("-inf"), tl.float32)
    total = tl.zeros([R], tl.float32)
    place = row
    for _ in range(PARTS):
        x = tl.load(part_lse + at, mask=inside, other=float("-inf"))  # [R]
        y = tl.load(part_o + place[:, None] * DV + c, mask=inside[:, None] & (c < DV), other=0.0)  # [R, BDV]
        new_top = tl.maximum(top, x)
        below = tl.where(new_top == float("-inf"), 0.0, new_top)
        weight = tl.exp(x - below) if EXACT else tl.exp2(x - below)
        shrink = tl.exp(top - below) if EXACT else tl.exp2(top - below)
        acc = acc * shrink[:, None] + y * weight[:, None]
        total = total * shrink + weight
        top = new_top
        place += ROWS
        at += ROWS
    acc = acc / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(o + row[:, None] * DV + c, acc.to(o.dtype.element_ty), mask=inside[:, None] & (c < DV))
    if lse is not None:
        sums = tl.where(total == 0.0, float("inf"), top + _logarithm(tl.where(total == 0.0, 1.0, total), EXACT))
        tl.store(lse + own, sums, mask=inside)
