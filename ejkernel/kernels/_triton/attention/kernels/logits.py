"""What the kernels of softmax attention share: which tiles a program visits, and the logits of a tile.

A tile is queries t times keys j, in either order: t and j are [BM, 1] and [1, BN], or [1, BM] and [BN, 1] where scores are
computed transposed. Logits are in base 2: log2(e) times those of the definition, so that weights are powers of two. Those of
EXACT calls are in base e: that factor would round scores, which may be so large that its error moves weights.

    x = cap * tanh(scale * q . k / cap) + bias                -inf where masked
    tanh(u) = 1 - 2 r,  r = 1 / (1 + exp(2 u)),               its slope 1 - tanh(u)^2 = 4 r (1 - r)

What every kernel gets of a call beside its operands goes together: `given` holds (bias, mask, q_segments, kv_segments,
q_positions, kv_positions, words, factor, cap, T, S), with None for what there is not; factor is the scale in the logits' base.
HOW is what is compiled in:

    LEFT, RIGHT   keys that a query sees, from t - LEFT to t + RIGHT, by indices or positions; None: all
    BIAS, MASK    the axes of these planes, see `_pairs`
    IDS_B         1 where segments and positions differ over the batch, else 0
    CAPPED        whether there is a soft cap
    DROPPED       dropout keeps the weights whose random bits are at least this
    FUSED         the scale is multiplied where the maximum is subtracted: no cap, no bias
    EXACT         float32: scores come scaled, and logits are in base e
    SURVIVES      what dropout multiplies a kept weight by
    DIVIDES       a power of two that divides S, see `aligned`
    SHARED        whether the rows of the batch share a bias, see `program_at`
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # of the kernels imported now
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def aligned(S, HOW: tl.constexpr):
    """S, known to be a multiple of DIVIDES: whole vectors of a plane's row are then inside or outside, and copied ahead."""
    return (S // HOW[10]) * HOW[10]


@triton.jit
def power(x, HOW: tl.constexpr):
    """The base of the logits to the x."""
    if HOW[8]:
        return tl.exp(x)
    else:
        return tl.exp2(x)


@triton.jit
def program_at(tiles, heads, SHARED: tl.constexpr = False):
    """(tile, head, row of the batch as int64) of a program: tiles count fastest, so what runs at one time shares keys.

    Heads are next, or where the batch is SHARED its rows: a bias is then read from memory once for all of them.
    """
    pid = tl.program_id(0)
    others = pid // tiles
    if SHARED:
        batch = tl.num_programs(0) // (tiles * heads)
        return pid % tiles, others // batch, (others % batch).to(tl.int64)
    else:
        return pid % tiles, others % heads, (others // heads).to(tl.int64)


@triton.jit
def load_tile(x, row, rows, HEADS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BD: tl.constexpr, CHECK: tl.constexpr):
    """[R, BD]: rows from `row` on of x [rows, HEADS, D], a pointer to one head; 0 outside. CHECK: some may be outside."""
    r = tl.arange(0, R)[:, None]
    c = tl.arange(0, BD)[None, :]
    at = x + row.to(tl.int64) * (HEADS * D) + (r * (HEADS * D) + c)
    if CHECK:
        if D % BD == 0:
            return tl.load(at, mask=row + r < rows, other=0.0)
        else:
            return tl.load(at, mask=(row + r < rows) & (c < D), other=0.0)
    elif D % BD == 0:
        return tl.load(at)
    else:
        return tl.load(at, mask=c < D, other=0.0)


@triton.jit
def store_tile(x, value, row, rows, HEADS: tl.constexpr, D: tl.constexpr, R: tl.constexpr, BD: tl.constexpr):
    """Writes [R, BD] where `load_tile` reads it."""
    r = tl.arange(0, R)[:, None]
    c = tl.arange(0, BD)[None, :]
    at = x + row.to(tl.int64) * (HEADS * D) + (r * (HEADS * D) + c)
    tl.store(at, value.to(x.dtype.element_ty), mask=(row + r < rows) & (c < D))


@triton.jit
def _first_to_last(first_row, last_row, length, LEFT: tl.constexpr, RIGHT: tl.constexpr, BN: tl.constexpr):
    """What `visited` gives for rows that see columns from `row - LEFT` to `row + RIGHT`, by their indices."""
    first = 0
    full_first = 0
    last = (length + BN - 1) // BN
    full_last = length // BN
    if LEFT is not None:
        first = tl.maximum(first_row - LEFT, 0) // BN
        full_first = (tl.maximum(last_row - LEFT, 0) + BN - 1) // BN
    if RIGHT is not None:
        last = (tl.minimum(length, last_row + RIGHT + 1) + BN - 1) // BN
        full_last = tl.minimum(length, first_row + RIGHT + 1) // BN
    first = tl.minimum(first, last)
    full_first = tl.minimum(tl.maximum(full_first, first), last)
    return first, full_first, tl.maximum(tl.minimum(full_last, last), full_first), last


@triton.jit
def visited(
    ranges, batch, head, tile, first_row, rows, length, tiles, H: tl.constexpr, RANGES_B: tl.constexpr, RANGES_H: tl.constexpr,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """(first, full_first, full_last, last): the tiles of columns, from first to last, that rows of a tile see something of.

    Of those from full_first to full_last everything is seen: nothing masks there. ranges [batch, heads, tiles, 4] says so where
    something other than indices masks; `rows` is how many rows from first_row on there are.
    """
    if ranges is not None:
        at = ranges + (((batch * RANGES_B) * RANGES_H + head // (H // RANGES_H)) * tiles + tile) * 4
        return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    else:
        return _first_to_last(first_row, first_row + rows - 1, length, LEFT, RIGHT, BN)


@triton.jit
def masked_tile(n, full_first, full_last):
    """The n-th tile when those of which everything is seen are left out."""
    return tl.where(n < full_first, n, n + (full_last - full_first))


@triton.jit
def _pairs(plane, batch, head, t, j, T, S, H: tl.constexpr, PLANE: tl.constexpr):
    """Pointers to pairs (t, j) of a plane [1|B, heads, 1|T, 1|S].

    PLANE: (whether it varies over the batch, heads, over queries, over keys).
    """
    BATCH: tl.constexpr = PLANE[0]
    HEADS: tl.constexpr = PLANE[1]
    QUERIES: tl.constexpr = PLANE[2]
    KEYS: tl.constexpr = PLANE[3]
    at = (batch * BATCH) * HEADS + head // (H // HEADS)
    if QUERIES:
        at = at * T + t
    if KEYS:
        at = at * S
    at = plane + at
    return at + j if KEYS else at + j * 0


@triton.jit
def kept_pairs(given, batch, head, t, j, H: tl.constexpr, HOW: tl.constexpr, OF_KEYS: tl.constexpr):
    """Which pairs (t, j) attend. Queries, or OF_KEYS keys, may go beyond the last one: those rows are nobody's."""
    _bias, mask, q_segments, kv_segments, q_positions, kv_positions, _words, _factor, _cap, T, S = given
    LEFT: tl.constexpr = HOW[0]
    RIGHT: tl.constexpr = HOW[1]
    IDS_B: tl.constexpr = HOW[4]
    keep = t < T if OF_KEYS else j < S
    if LEFT is not None or RIGHT is not None:
        distance = j - t
        if q_positions is not None:
            of_keys = tl.load(kv_positions + (batch * IDS_B) * S + j, mask=j < S, other=0)
            distance = of_keys - tl.load(q_positions + (batch * IDS_B) * T + t, mask=t < T, other=0)
        if LEFT is not None:
            keep = keep & (distance >= -LEFT)
        if RIGHT is not None:
            keep = keep & (distance <= RIGHT)
    if q_segments is not None:
        q_id = tl.load(q_segments + (batch * IDS_B) * T + t, mask=t < T, other=-1)
        kv_id = tl.load(kv_segments + (batch * IDS_B) * S + j, mask=j < S, other=-1)
        keep = keep & (q_id == kv_id) & (q_id >= 0)
    if mask is not None:
        MASK: tl.constexpr = HOW[3]
        inside = (t < T) & (j < S)
        keep = keep & (tl.load(_pairs(mask, batch, head, t, j, T, S, H, MASK), mask=inside, other=0) != 0)
    return keep


@triton.jit
def _reciprocal(x):
    """1 / x for x >= 1, by the one instruction that it takes."""
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _small_tanh(u):
    """tanh(u) for |u| up to 0.6, where 1 - 2 r has lost digits: u + u^3 times a polynomial fitted there."""
    z = u * u
    return u + u * z * (-0.33333283 + z * (0.13331491 + z * (-0.05374493 + z * (0.0206591 - 0.00573023 * z))))


@triton.jit
def logits(s, given, batch, head, t, j, H: tl.constexpr, HOW: tl.constexpr, CHECK: tl.constexpr):
    """(x, slope): logits from scores s = q . k, before masks; the slope of the soft cap, if there is one.

    Of FUSED calls (no cap, no bias) scores are left as they are: the scale is multiplied where the maximum is subtracted. Of
    EXACT ones scores come scaled already. CHECK: some pairs may be outside.
    """
    bias, _mask, _qs, _ks, _qp, _kp, _words, factor, cap, T, S = given
    EXACT: tl.constexpr = HOW[8]
    UNIT: tl.constexpr = 1.0 if EXACT else LOG2E
    x = s
    slope = s
    if HOW[5]:
        of_score = 2.0 * LOG2E / cap if EXACT else 2.0 * factor / cap
        exponent = s * of_score
        r = _reciprocal(1.0 + tl.exp2(exponent))
        top = cap * UNIT
        x = top - (2.0 * top) * r
        slope = 4.0 * r * (1.0 - r)
        if EXACT:
            u = exponent * (0.5 * LN2)
            x = tl.where(tl.abs(u) < 0.6, top * _small_tanh(u), x)
    elif not HOW[7] and not EXACT:
        x = s * factor
    if bias is not None:
        BIAS: tl.constexpr = HOW[2]
        at = _pairs(bias, batch, head, t, j, T, S, H, BIAS)
        if CHECK:
            x += tl.load(at, mask=(t < T) & (j < S), other=0.0).to(tl.float32) * UNIT
        else:
            x += tl.load(at).to(tl.float32) * UNIT
    return x, slope


@triton.jit
def _mix(x):
    """`ejkernel.kernels._attention.dropout._mix`."""
    x = (x ^ (x >> 16)) * 0x6A09E667
    x = (x ^ (x >> 15)) * 0xBB67AE85
    return x ^ (x >> 16)


@triton.jit
def kept_weights(given, batch, head, t, j, H: tl.constexpr, HOW: tl.constexpr):
    """Which weights dropout keeps: the bits of `ejkernel.kernels._attention.dropout.kept`."""
    words, T = given[6], given[9]
    at = words + ((batch * H + head) * T + t) * 2
    first = tl.load(at, mask=t < T, other=0)
    second = tl.load(at + 1, mask=t < T, other=0)
    bits = _mix(_mix(j.to(tl.uint32) * 0x9E3779B9 + first) ^ second)
    return bits >= tl.full([1, 1], HOW[6], tl.uint32)
