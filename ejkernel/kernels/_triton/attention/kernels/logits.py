"""What the kernels of softmax attention share: which tiles a program visits, and the logits of a tile.

A tile is queries t times keys j, in either order: t and j are [BM, 1] and [1, BN], or [1, BM] and [BN, 1] where scores are
computed transposed. Logits are in base 2: log2(e) times those of the definition, so that weights are powers of two. Those of
EXACT calls are in base e: that factor would round scores, which may be so large that its error moves weights.

    x = cap * tanh(scale * q . k / cap) + bias                -inf where masked
    tanh(u) = 1 - 2 r,  r = 1 / (1 + exp(2 u)),               its slope 1 - tanh(u)^2 = 4 r (1 - r)

What every kernel gets of a call beside its operands is in call.py: `given` when it runs, CALL compiled in.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # of the kernels imported now
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def aligned(S, CALL: tl.constexpr):
    """S, known to be a multiple of KEYS_DIVIDE: whole vectors of a plane's row are then inside or outside, and copied ahead."""
    return (S // CALL.KEYS_DIVIDE) * CALL.KEYS_DIVIDE


@triton.jit
def power(x, CALL: tl.constexpr):
    """The base of the logits to the x."""
    if CALL.EXACT:
        return tl.exp(x)
    else:
        return tl.exp2(x)


@triton.jit
def program_at(tiles, heads, SHARED: tl.constexpr = False, TOGETHER: tl.constexpr = 1):
    """(tile, head, row of the batch as int64) of a program.

    So many heads go TOGETHER, tile by tile: few enough that what runs at one time shares keys, and so many that the longest
    programs of the last ones, which start first, end with the others. Their rows of the batch are next, or where the batch is
    SHARED come before the heads: a bias is then read from memory once for all of them.
    """
    pid = tl.program_id(0)
    count = tl.num_programs(0) // tiles  # heads of all rows of the batch
    begin = pid // (tiles * TOGETHER) * TOGETHER
    width = tl.minimum(TOGETHER, count - begin)
    place = pid - begin * tiles
    tile = place // width
    others = begin + place % width
    if SHARED:
        batch = count // heads
        return tile, others // batch, (others % batch).to(tl.int64)
    else:
        return tile, others % heads, (others // heads).to(tl.int64)


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
    ranges, batch, head, tile, first_row, rows, length, tiles, BN: tl.constexpr, CALL: tl.constexpr, RANGES_B: tl.constexpr,
    RANGES_H: tl.constexpr, OF_KEYS: tl.constexpr,
):  # fmt: skip
    """(first, full_first, full_last, last): the tiles of columns, from first to last, that rows of a tile see something of.

    Of those from full_first to full_last everything is seen: nothing masks there. ranges [batch, heads, tiles, 4] says so where
    something other than indices masks; `rows` is how many rows from first_row on there are. Rows are queries, or OF_KEYS keys.
    """
    if ranges is not None:
        at = ranges + (((batch * RANGES_B) * RANGES_H + head // (CALL.H // RANGES_H)) * tiles + tile) * 4
        return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    elif OF_KEYS:
        return _first_to_last(first_row, first_row + rows - 1, length, CALL.RIGHT, CALL.LEFT, BN)
    else:
        return _first_to_last(first_row, first_row + rows - 1, length, CALL.LEFT, CALL.RIGHT, BN)


@triton.jit
def seen_tile(row, column, q_positions, BM: tl.constexpr, BN: tl.constexpr, CALL: tl.constexpr):
    """Whether a tile of queries from `row` on sees any of the keys from `column` on, by their indices."""
    LEFT: tl.constexpr = CALL.LEFT
    RIGHT: tl.constexpr = CALL.RIGHT
    seen = row >= 0
    if q_positions is None:
        if LEFT is not None:
            seen = seen & (column + BN - 1 >= row - LEFT)
        if RIGHT is not None:
            seen = seen & (column <= row + BM - 1 + RIGHT)
    return seen


@triton.jit
def masked_tile(n, full_first, full):
    """The n-th tile when those of which everything is seen, `full` of them, are left out.

    Kernels compute `full` once, before their first loop: where it is computed again after the loop, LLVM does so on the way
    around it, which sets the accumulators apart there, and ptxas then waits for every product by itself (its warning C7515).
    """
    return tl.where(n < full_first, n, n + full)


@triton.jit
def _load_plane(plane, batch, head, t, j, T, S, H: tl.constexpr, PLANE: tl.constexpr, CHECK: tl.constexpr):
    """What a plane, whose axes are PLANE, has for queries t and keys j; an axis that it does not vary over is of size 1.

    CHECK: some may be outside; 0 there.
    """
    BATCH: tl.constexpr = PLANE.BATCH
    HEADS: tl.constexpr = PLANE.HEADS
    QUERIES: tl.constexpr = PLANE.QUERIES
    KEYS: tl.constexpr = PLANE.KEYS
    at = (batch * BATCH) * HEADS + head // (H // HEADS)
    if QUERIES and KEYS:
        at = plane + (at * T + t) * S + j
        return tl.load(at, mask=(t < T) & (j < S), other=0) if CHECK else tl.load(at)
    elif KEYS:
        at = plane + at * S + j
        return tl.load(at, mask=j < S, other=0) if CHECK else tl.load(at)
    elif QUERIES:
        at = plane + at * T + t
        return tl.load(at, mask=t < T, other=0) if CHECK else tl.load(at)
    else:
        return tl.load(plane + at)


@triton.jit
def _kept_bits(bits, own, inside, words, first, C: tl.constexpr):
    """Bits [R, C] of rows `own` [R, 1], those from column `first` on, a multiple of C.

    A thread's shift is the same for all of its columns, which differ in the other digits where tensor cores leave them: two
    instructions a score then.
    """
    c = tl.arange(0, C)[None, :]
    at = bits + own * words + first // 32
    word = tl.load(at, mask=inside, other=0)  # [R, 1]
    place = c & 31
    if C < 32:
        place = (first & 31) + c
    for i in tl.static_range(1, C // 32):
        word = tl.where(c < i * 32, word, tl.load(at + i, mask=inside, other=0))  # [R, C]
    one = tl.full([1, C], 1, tl.uint32)
    return ((word >> (place & 6).to(tl.uint32)) & (one << (place & 25).to(tl.uint32))) != 0


@triton.jit
def kept_scores(given, batch, head, t, j, first, CALL: tl.constexpr, OF_KEYS: tl.constexpr):
    """Whether query t attends to key j. Queries, or OF_KEYS keys, may go beyond the last one: those rows are nobody's.

    `first` is the first key of the tile, or OF_KEYS its first query.
    """
    if CALL.PACKED:
        MASK: tl.constexpr = CALL.MASK
        plane = (batch * MASK.BATCH) * MASK.HEADS + head // (CALL.H // MASK.HEADS)
        if OF_KEYS:
            own = plane * given.S + j
            return _kept_bits(given.mask_of_keys, own, j < given.S, words_of(given.T), first, t.shape[1])
        else:
            own = plane * given.T + t
            return _kept_bits(given.mask, own, t < given.T, words_of(given.S), first, j.shape[1])
    else:
        return _kept_of_parts(given, batch, head, t, j, CALL, OF_KEYS)


@triton.jit
def words_of(length):
    """Words that hold the bits of a row: whole tiles of any size, so that none goes beyond."""
    return (length + 255) // 256 * 8


@triton.jit
def _kept_of_parts(given, batch, head, t, j, CALL: tl.constexpr, OF_KEYS: tl.constexpr):
    """The same from the mask as it is given, segments, positions and bounds."""
    T, S = given.T, given.S
    LEFT: tl.constexpr = CALL.LEFT
    RIGHT: tl.constexpr = CALL.RIGHT
    VARY: tl.constexpr = CALL.IDS_VARY
    keep = t < T if OF_KEYS else j < S
    if LEFT is not None or RIGHT is not None:
        distance = j - t
        if given.q_positions is not None:
            of_keys = tl.load(given.kv_positions + (batch * VARY) * S + j, mask=j < S, other=0)
            distance = of_keys - tl.load(given.q_positions + (batch * VARY) * T + t, mask=t < T, other=0)
        if LEFT is not None:
            keep = keep & (distance >= -LEFT)
        if RIGHT is not None:
            keep = keep & (distance <= RIGHT)
    if given.q_segments is not None:
        q_id = tl.load(given.q_segments + (batch * VARY) * T + t, mask=t < T, other=-1)
        kv_id = tl.load(given.kv_segments + (batch * VARY) * S + j, mask=j < S, other=-1)
        keep = keep & (q_id == kv_id) & (q_id >= 0)
    if given.mask is not None:
        MASK: tl.constexpr = CALL.MASK
        keep = keep & (_load_plane(given.mask, batch, head, t, j, T, S, CALL.H, MASK, True) != 0)
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
def logits(s, given, batch, head, t, j, CALL: tl.constexpr, CHECK: tl.constexpr):
    """(x, slope): logits from scores s = q . k, before masks; the slope of the soft cap, if there is one.

    Of FUSED calls (no cap, no bias) scores are left as they are: the scale is multiplied where the maximum is subtracted. Of
    EXACT ones scores come scaled already. CHECK: some scores may be outside.
    """
    cap, T, S = given.cap, given.T, given.S
    EXACT: tl.constexpr = CALL.EXACT
    UNIT: tl.constexpr = 1.0 if EXACT else LOG2E
    x = s
    slope = s
    if CALL.CAPPED:
        of_score = 2.0 * LOG2E / cap if EXACT else 2.0 * given.factor / cap
        exponent = s * of_score
        r = _reciprocal(1.0 + tl.exp2(exponent))
        top = cap * UNIT
        x = top - (2.0 * top) * r
        slope = 4.0 * r * (1.0 - r)
        if CALL.CAPPED_NEAR_0:
            u = exponent * (0.5 * LN2)
            x = tl.where(tl.abs(u) < 0.6, top * _small_tanh(u), x)
    elif not CALL.FUSED and not EXACT:
        x = s * given.factor
    if given.bias is not None:
        BIAS: tl.constexpr = CALL.BIAS
        x += _load_plane(given.bias, batch, head, t, j, T, S, CALL.H, BIAS, CHECK).to(tl.float32) * UNIT
    return x, slope


@triton.jit
def _mix(x):
    """`ejkernel.kernels._attention.dropout._mix`."""
    x = (x ^ (x >> 16)) * 0x6A09E667
    x = (x ^ (x >> 15)) * 0xBB67AE85
    return x ^ (x >> 16)


@triton.jit
def kept_weights(given, batch, head, t, j, CALL: tl.constexpr):
    """Which weights dropout keeps: the bits of `ejkernel.kernels._attention.dropout.kept`."""
    words, T = given.words, given.T
    at = words + ((batch * CALL.H + head) * T + t) * 2
    first = tl.load(at, mask=t < T, other=0)
    second = tl.load(at + 1, mask=t < T, other=0)
    bits = _mix(_mix(j.to(tl.uint32) * 0x9E3779B9 + first) ^ second)
    return bits >= tl.full([1, 1], CALL.DROPPED, tl.uint32)
