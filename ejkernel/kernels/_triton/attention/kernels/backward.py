"""The backward pass. Weights are made again from the logits x and lse, so that nothing of size T * S is kept:

    p  = 2^(x - lse), see logits.py      delta = sum(do * o)
    dv = dropped(p)^T do                 ds    = p * (dropped(do v^T) - delta) * slope of the soft cap
    dq = scale ds k                      dk    = scale ds^T q                       dbias = ds, before that slope

Each gradient is summed by the programs that own it, in one order: queries' over tiles of keys, keys' and values' over the heads
of a group and tiles of queries, the bias's over what it is shared by. Nothing is added atomically: results are reproducible.

Scores of `flash_key_gradient` are transposed, [keys, queries]: p and ds are then left operands, which tensor cores take from
registers.
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
    seen_tile,
    store_tile,
    visited,
)


@triton.jit
def row_products(o, do, T, delta, H: tl.constexpr, DV: tl.constexpr, BDV: tl.constexpr, BM: tl.constexpr):
    """delta [B, H, T]: the sum over channels of o * do. Programs: tiles of queries * heads * batch."""
    tile, head, batch = program_at((T + BM - 1) // BM, H)
    at = (batch * T * H + head) * DV
    row = tile * BM
    bo = load_tile(o + at, row, T, H, DV, BM, BDV, True).to(tl.float32)  # [BM, BDV]
    bd = load_tile(do + at, row, T, H, DV, BM, BDV, True).to(tl.float32)
    t = row + tl.arange(0, BM)
    tl.store(delta + (batch * H + head) * T + t, tl.sum(bo * bd, 1), mask=t < T)


@triton.jit
def _weights(s, given, lse, batch, head, t, j, first, CALL: tl.constexpr, MASKED: tl.constexpr, OF_KEYS: tl.constexpr):
    """(p, slope) of a tile: the softmax's weights before dropout."""
    x, slope = logits(s, given, batch, head, t, j, CALL, MASKED)
    if MASKED:
        x = tl.where(kept_scores(given, batch, head, t, j, first, CALL, OF_KEYS), x, float("-inf"))
    if CALL.FUSED:
        p = power(x * given.factor - lse, CALL)
    else:
        p = power(x - lse, CALL)
    return p, slope


@triton.jit
def _logit_gradient(p, dp, delta, keep, CALL: tl.constexpr):
    """The gradient of the logits."""
    if keep is not None:
        dp = tl.where(keep, dp * CALL.SURVIVES, 0.0)
    dx = p * (dp - delta)
    if CALL.EXACT:
        # Where one key has all the weight, dp = delta; large queries would blow up the rounding error of the difference.
        dx = tl.where(p == 1.0, 0.0, dx)
    return dx


@triton.jit
def _query_step(
    dq, q, do, lse, delta, k, v, given, n, batch, head, t, MASKED: tl.constexpr, BN: tl.constexpr, CALL: tl.constexpr,
):  # fmt: skip
    """dq [BM, BD] with the part of the n-th tile of keys, unscaled."""
    S = given.S
    row = n * BN
    j = row + tl.arange(0, BN)[None, :]
    CHECK: tl.constexpr = MASKED and CALL.KEYS_DIVIDE % BN != 0
    bk = load_tile(k, row, S, CALL.HK, CALL.D, BN, CALL.BD, CHECK)  # [BN, BD]
    bv = load_tile(v, row, S, CALL.HK, CALL.DV, BN, CALL.BDV, CHECK)  # [BN, BDV]
    s = tl.dot(q, tl.trans(bk), input_precision=CALL.PREC)  # [BM, BN]
    p, slope = _weights(s, given, lse, batch, head, t, j, row, CALL, MASKED, False)
    dp = tl.dot(do, tl.trans(bv), input_precision=CALL.PREC)  # [BM, BN]
    keep = None
    if given.words is not None:
        keep = kept_weights(given, batch, head, t, j, CALL)
    ds = _logit_gradient(p, dp, delta, keep, CALL)
    if CALL.CAPPED:
        ds *= slope
    return tl.dot(ds.to(bk.dtype), bk, dq, input_precision=CALL.PREC)


@triton.jit
def flash_query_gradient(
    q, k, v, do, lse, delta, bias, mask, q_segments, kv_segments, q_positions, kv_positions, words, traced_scale, ranges, scale,
    cap, T, S,
    dq, dscale,
    CALL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, RANGES_B: tl.constexpr, RANGES_H: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Programs: query tiles * heads * batch. dq [B, T, H, D]; dscale [B, H, T], if given, each row's part of the scale's."""
    S = aligned(S, CALL)
    tiles = (T + BM - 1) // BM
    tile, head, batch = program_at(tiles, CALL.H, CALL.SHARED, CALL.TOGETHER)
    tile = tiles - 1 - tile  # causal: the longest first
    row = tile * BM
    kv_head = head // (CALL.H // CALL.HK)
    rows = tl.minimum(BM, T - row)
    first, full_first, full_last, last = visited(
        ranges, batch, head, tile, row, rows, S, tiles, BN, CALL, RANGES_B, RANGES_H, False
    )
    if bias is not None:
        full_last = tl.where(rows == BM, full_last, full_first)  # rows beyond the last query have no bias to read
    factor = scale
    if traced_scale is not None:
        factor = tl.load(traced_scale + batch * CALL.SCALE_VARIES).to(tl.float32)
    in_base = factor * (1.0 if CALL.EXACT else LOG2E)
    given = Given(bias, mask, None, q_segments, kv_segments, q_positions, kv_positions, words, in_base, cap, T, S)
    t = row + tl.arange(0, BM)[:, None]
    q += (batch * T * CALL.H + head) * CALL.D
    bq = load_tile(q, row, T, CALL.H, CALL.D, BM, CALL.BD, True)  # [BM, BD]
    if CALL.EXACT:
        bq = bq * in_base
    bd = load_tile(do + (batch * T * CALL.H + head) * CALL.DV, row, T, CALL.H, CALL.DV, BM, CALL.BDV, True)  # [BM, BDV]
    at = (batch * CALL.H + head) * T + t
    blse = tl.load(lse + at, mask=t < T, other=float("inf"))  # [BM, 1]
    bdelta = tl.load(delta + at, mask=t < T, other=0.0)
    k += (batch * S * CALL.HK + kv_head) * CALL.D
    v += (batch * S * CALL.HK + kv_head) * CALL.DV
    BD: tl.constexpr = CALL.BD
    acc = tl.zeros([BM, BD], tl.float32)
    full = full_last - full_first
    for n in tl.range(full_first, full_first + full, num_stages=STAGES):
        acc = _query_step(acc, bq, bd, blse, bdelta, k, v, given, n, batch, head, t, False, BN, CALL)
    for n in tl.range(first, last - full, num_stages=STAGES):
        tile_n = masked_tile(n, full_first, full)
        acc = _query_step(acc, bq, bd, blse, bdelta, k, v, given, tile_n, batch, head, t, True, BN, CALL)
    store_tile(dq + (batch * T * CALL.H + head) * CALL.D, acc * factor, row, T, CALL.H, CALL.D, BM, CALL.BD)
    if dscale is not None:
        unscaled = load_tile(q, row, T, CALL.H, CALL.D, BM, CALL.BD, True).to(tl.float32)  # [BM, BD]
        tl.store(dscale + at, tl.sum(acc * unscaled, 1)[:, None], mask=t < T)


@triton.jit
def _key_step(
    state, k, v, q, do, lse, delta, given, n, batch, head, j, MASKED: tl.constexpr, BM: tl.constexpr, CALL: tl.constexpr,
):  # fmt: skip
    """(dk [BN, BD], dv [BN, BDV]) with the part of the n-th tile of queries; dk unscaled but of EXACT calls."""
    dk, dv = state
    T = given.T
    row = n * BM
    t = row + tl.arange(0, BM)[None, :]
    CHECK: tl.constexpr = MASKED and CALL.QUERIES_DIVIDE % BM != 0
    bq = load_tile(q, row, T, CALL.H, CALL.D, BM, CALL.BD, CHECK)  # [BM, BD]
    if CALL.EXACT:
        bq = bq * given.factor
    bd = load_tile(do, row, T, CALL.H, CALL.DV, BM, CALL.BDV, CHECK)  # [BM, BDV]
    if CHECK:
        blse = tl.load(lse + t, mask=t < T, other=float("inf"))  # [1, BM]
        bdelta = tl.load(delta + t, mask=t < T, other=0.0)
    else:
        blse = tl.load(lse + t)
        bdelta = tl.load(delta + t)
    s = tl.dot(k, tl.trans(bq), input_precision=CALL.PREC)  # [BN, BM]
    p, slope = _weights(s, given, blse, batch, head, t, j, row, CALL, MASKED, True)
    keep = None
    dropped = p
    if given.words is not None:
        keep = kept_weights(given, batch, head, t, j, CALL)
        dropped = tl.where(keep, p * CALL.SURVIVES, 0.0)
    dv = tl.dot(dropped.to(bd.dtype), bd, dv, input_precision=CALL.PREC)
    dp = tl.dot(v, tl.trans(bd), input_precision=CALL.PREC)  # [BN, BM]
    ds = _logit_gradient(p, dp, bdelta, keep, CALL)
    if CALL.CAPPED:
        ds *= slope
    dk = tl.dot(ds.to(bq.dtype), bq, dk, input_precision=CALL.PREC)
    return dk, dv


@triton.jit
def flash_key_gradient(
    q, k, v, do, lse, delta, bias, mask, mask_of_keys, q_segments, kv_segments, q_positions, kv_positions, words, traced_scale,
    ranges, scale, cap, T, S,
    dk, dv,
    CALL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, RANGES_B: tl.constexpr, RANGES_H: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Programs: key tiles * key heads * batch. dk [B, S, HK, D], dv [B, S, HK, DV]; ranges: of query tiles per key tile."""
    S = aligned(S, CALL)
    G: tl.constexpr = CALL.H // CALL.HK
    tiles = (S + BN - 1) // BN
    tile, kv_head, batch = program_at(tiles, CALL.HK, CALL.SHARED, CALL.TOGETHER)
    row = tile * BN
    rows = tl.minimum(BN, S - row)
    factor = scale
    if traced_scale is not None:
        factor = tl.load(traced_scale + batch * CALL.SCALE_VARIES).to(tl.float32)
    in_base = factor * (1.0 if CALL.EXACT else LOG2E)
    given = Given(bias, mask, mask_of_keys, q_segments, kv_segments, q_positions, kv_positions, words, in_base, cap, T, S)
    j = row + tl.arange(0, BN)[:, None]
    bk = load_tile(k + (batch * S * CALL.HK + kv_head) * CALL.D, row, S, CALL.HK, CALL.D, BN, CALL.BD, True)  # [BN, BD]
    bv = load_tile(v + (batch * S * CALL.HK + kv_head) * CALL.DV, row, S, CALL.HK, CALL.DV, BN, CALL.BDV, True)  # [BN, BDV]
    BD: tl.constexpr = CALL.BD
    BDV: tl.constexpr = CALL.BDV
    state = (tl.zeros([BN, BD], tl.float32), tl.zeros([BN, BDV], tl.float32))
    for g in range(G):
        head = kv_head * G + g
        first, full_first, full_last, last = visited(
            ranges, batch, head, tile, row, rows, T, tiles, BM, CALL, RANGES_B, RANGES_H, True
        )
        if bias is not None:
            full_last = tl.where(rows == BN, full_last, full_first)
        hq = q + (batch * T * CALL.H + head) * CALL.D
        hd = do + (batch * T * CALL.H + head) * CALL.DV
        hl = lse + (batch * CALL.H + head) * T
        he = delta + (batch * CALL.H + head) * T
        full = full_last - full_first
        for n in tl.range(full_first, full_first + full, num_stages=STAGES):
            state = _key_step(state, bk, bv, hq, hd, hl, he, given, n, batch, head, j, False, BM, CALL)
        for n in tl.range(first, last - full, num_stages=STAGES):
            tile_n = masked_tile(n, full_first, full)
            state = _key_step(state, bk, bv, hq, hd, hl, he, given, tile_n, batch, head, j, True, BM, CALL)
    sum_k, sum_v = state
    if not CALL.EXACT:
        sum_k *= factor
    store_tile(dk + (batch * S * CALL.HK + kv_head) * CALL.D, sum_k, row, S, CALL.HK, CALL.D, BN, CALL.BD)
    store_tile(dv + (batch * S * CALL.HK + kv_head) * CALL.DV, sum_v, row, S, CALL.HK, CALL.DV, BN, CALL.BDV)


@triton.jit
def _bias_step(
    acc, q, k, v, do, lse, delta, given, row, column, batch, head, BM: tl.constexpr, BN: tl.constexpr, CALL: tl.constexpr,
):  # fmt: skip
    """acc [BM, BN] with the logits' gradient of one tile of one head."""
    T, S = given.T, given.S
    t = row + tl.arange(0, BM)[:, None]
    j = column + tl.arange(0, BN)[None, :]
    kv_head = head // (CALL.H // CALL.HK)
    bq = load_tile(q + (batch * T * CALL.H + head) * CALL.D, row, T, CALL.H, CALL.D, BM, CALL.BD, True)  # [BM, BD]
    if CALL.EXACT:
        bq = bq * given.factor
    bk = load_tile(k + (batch * S * CALL.HK + kv_head) * CALL.D, column, S, CALL.HK, CALL.D, BN, CALL.BD, True)  # [BN, BD]
    bd = load_tile(do + (batch * T * CALL.H + head) * CALL.DV, row, T, CALL.H, CALL.DV, BM, CALL.BDV, True)  # [BM, BDV]
    bv = load_tile(v + (batch * S * CALL.HK + kv_head) * CALL.DV, column, S, CALL.HK, CALL.DV, BN, CALL.BDV, True)  # [BN, BDV]
    at = (batch * CALL.H + head) * T + t
    blse = tl.load(lse + at, mask=t < T, other=float("inf"))  # [BM, 1]
    bdelta = tl.load(delta + at, mask=t < T, other=0.0)
    s = tl.dot(bq, tl.trans(bk), input_precision=CALL.PREC)  # [BM, BN]
    p, _slope = _weights(s, given, blse, batch, head, t, j, column, CALL, True, False)
    dp = tl.dot(bd, tl.trans(bv), input_precision=CALL.PREC)
    keep = None
    if given.words is not None:
        keep = kept_weights(given, batch, head, t, j, CALL)
    return acc + _logit_gradient(p, dp, bdelta, keep, CALL)


@triton.jit
def flash_bias_gradient(
    q, k, v, do, lse, delta, bias, mask, q_segments, kv_segments, q_positions, kv_positions, words, traced_scale, scale, cap,
    T, S, B,
    dbias,
    CALL: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """dbias, of the bias's shape. Programs: its tiles * its heads * its batch; each sums over all that share its tile."""
    BATCH: tl.constexpr = CALL.BIAS.BATCH
    HEADS: tl.constexpr = CALL.BIAS.HEADS
    QUERIES: tl.constexpr = CALL.BIAS.QUERIES
    KEYS: tl.constexpr = CALL.BIAS.KEYS
    SHARED: tl.constexpr = CALL.H // HEADS  # query heads that share one of the bias
    S = aligned(S, CALL)
    tiles_q = (T + BM - 1) // BM
    tiles_k = (S + BN - 1) // BN
    own_q = tiles_q if QUERIES else 1
    own_k = tiles_k if KEYS else 1
    tile, own_head, own_batch = program_at(own_q * own_k, HEADS)
    own_tile_q = tile // own_k
    own_tile_k = tile % own_k
    factor = scale
    if traced_scale is not None:
        factor = tl.load(traced_scale + own_batch * CALL.SCALE_VARIES).to(tl.float32)
    in_base = factor * (1.0 if CALL.EXACT else LOG2E)
    given = Given(bias, mask, None, q_segments, kv_segments, q_positions, kv_positions, words, in_base, cap, T, S)
    acc = tl.zeros([BM, BN], tl.float32)
    over_b = 1 if BATCH else B
    if QUERIES and KEYS:
        row = own_tile_q * BM
        column = own_tile_k * BN
        turns = tl.where(seen_tile(row, column, q_positions, BM, BN, CALL), over_b * SHARED, 0)
        for n in tl.range(0, turns, num_stages=STAGES):
            head = own_head * SHARED + n % SHARED
            batch = own_batch + n // SHARED  # int64 as the first one
            acc = _bias_step(acc, q, k, v, do, lse, delta, given, row, column, batch, head, BM, BN, CALL)
    else:
        over_q = 1 if QUERIES else tiles_q
        over_k = 1 if KEYS else tiles_k
        for n in range(over_b * SHARED * over_q * over_k):
            others = n // over_k
            row = (own_tile_q + others % over_q) * BM
            column = (own_tile_k + n % over_k) * BN
            others = others // over_q
            head = own_head * SHARED + others % SHARED
            batch = own_batch + others // SHARED
            if seen_tile(row, column, q_positions, BM, BN, CALL):
                acc = _bias_step(acc, q, k, v, do, lse, delta, given, row, column, batch, head, BM, BN, CALL)
    at = own_batch * HEADS + own_head
    t = own_tile_q * BM + tl.arange(0, BM)[:, None]
    j = own_tile_k * BN + tl.arange(0, BN)[None, :]
    if QUERIES and KEYS:
        tl.store(dbias + (at * T + t) * S + j, acc.to(dbias.dtype.element_ty), mask=(t < T) & (j < S))
    elif QUERIES:
        total = tl.sum(acc, 1)[:, None]
        tl.store(dbias + at * T + t, total.to(dbias.dtype.element_ty), mask=t < T)
    elif KEYS:
        total = tl.sum(acc, 0)[None, :]
        tl.store(dbias + at * S + j, total.to(dbias.dtype.element_ty), mask=j < S)
    else:
        tl.store(dbias + at, tl.sum(acc).to(dbias.dtype.element_ty))
