"""What the linear-attention kernels share: where a chunk's rows lie, loads and stores of tiles, sums of log decays.

A chunk is C rows of one sequence, row r being the r-th step of the recurrence in that chunk: token
`token + SIGN * r` of the flat token axis (SIGN is -1 when the recurrence runs backwards). Rows from `rows` on are padding
and read as steps that change nothing.

Sums of log decays are matrix products with 0/1 matrices on the tensor cores: the decays are split into bfloat16 parts whose sum
is exact, and each sum runs over just the steps it spans, so nothing is subtracted (but in `weak_chunks`, `key_value_scan`,
`head_decays` and `head_gate_backward`, which say when they may, and their forms by warpgroups). -inf is clamped to -1e30, whose
exponential is 0 as well but whose product with 0 is not NaN.
"""

# ruff: noqa: RUF005  (Triton knows tuples and their sums, but not iterable unpacking)
from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)  # of the kernels imported now


LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def exp2_of_log(x):
    """2^x for a log decay in base 2, by the one instruction that it takes: tl.exp2 adds a range that no decay needs."""
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def exp_of_log(x):
    """exp(x) for a log decay: see `exp2_of_log`."""
    if INTERPRETED:
        return tl.exp(x)
    else:
        return exp2_of_log(x * LOG2_E)


@triton.jit
def clamped(log, LEAST: tl.constexpr = -1e30):
    """A log decay that no product with 0 makes NaN: -inf becomes LEAST. NaN stays NaN, which `maximum` alone would drop."""
    return tl.maximum(log, LEAST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def program_at(TILES: tl.constexpr, H: tl.constexpr):
    """(tile, head, chunk or segment or sequence) of a program: tiles count fastest, then heads.

    What runs at one time then reads and writes whole rows of [tokens, heads, channels], and of packed segments, which are in
    order of length, the long ones of all heads come first.
    """
    pid = tl.program_id(0)
    others = pid // TILES
    return pid % TILES, others % H, others // H


@triton.jit
def put(x, i: tl.constexpr, value):
    """The tuple x with element i replaced."""
    return x[:i] + (value,) + x[i + 1 :]


@triton.jit
def chunk_at(chunks, s, T, NT, C: tl.constexpr, SIGN: tl.constexpr):
    """(token of row 0 as int64, rows in use, sequence) of chunk s; chunks: table [3, NT] of packed calls, or None."""
    if chunks is not None:
        token = tl.load(chunks + s).to(tl.int64)
        rows = tl.load(chunks + NT + s)
        seq = tl.load(chunks + 2 * NT + s)
    else:
        seq = s // NT
        begin = (s % NT) * C
        rows = tl.minimum(T - begin, C)
        if SIGN == 1:
            token = seq.to(tl.int64) * T + begin
        else:
            token = seq.to(tl.int64) * T + (T - 1 - begin)
    return token, rows, seq


@triton.jit
def all_weak(weak, first, head, COUNT, H: tl.constexpr, GROUP: tl.constexpr):
    """Whether all of GROUP chunks are `weak` [chunks, H] in this head."""
    s = first + tl.arange(0, GROUP)
    return tl.min(tl.load(weak + s.to(tl.int64) * H + head, mask=s < COUNT, other=1), 0) == 1


@triton.jit
def weak_from(weak, first, count, head, H: tl.constexpr):
    """Whether all of `count` chunks from `first` on are `weak` [chunks, H] in this head."""
    found = 1
    for n in range(0, count, 64):
        i = n + tl.arange(0, 64)
        flags = tl.load(weak + (first + i).to(tl.int64) * H + head, mask=i < count, other=1)
        found = tl.minimum(found, tl.min(flags, 0))
    return found == 1


@triton.jit
def _mask(rows, col, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, EVEN: tl.constexpr, WALKED: tl.constexpr):
    r = tl.arange(0, C)[:, None]
    c = col + tl.arange(0, BD)[None, :]
    if D % BD == 0 and WALKED <= D:
        return r < rows
    elif EVEN:
        return c < D
    else:
        return (r < rows) & (c < D)


@triton.jit
def load_rows(
    x, token, rows, head, col, HEADS: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, SIGN: tl.constexpr,
    EVEN: tl.constexpr, WALKED: tl.constexpr = 0,
):  # fmt: skip
    """[C, BD]: columns from `col` on of a chunk's rows of x [tokens, HEADS, D]; 0 outside. EVEN: every chunk is full.

    WALKED: how many channels are walked over, where these may be more than D: whole tiles then lie outside.
    """
    at = x + (token * HEADS + head) * D + ((SIGN * HEADS * D) * tl.arange(0, C)[:, None] + (col + tl.arange(0, BD))[None, :])
    if EVEN and D % BD == 0 and WALKED <= D:
        return tl.load(at)
    else:
        return tl.load(at, mask=_mask(rows, col, D, C, BD, EVEN, WALKED), other=0.0)


@triton.jit
def store_rows(
    x, value, token, rows, head, col, HEADS: tl.constexpr, D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr,
    SIGN: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    """Writes [C, BD] where `load_rows` reads it."""
    at = x + (token * HEADS + head) * D + ((SIGN * HEADS * D) * tl.arange(0, C)[:, None] + (col + tl.arange(0, BD))[None, :])
    if EVEN and D % BD == 0:
        tl.store(at, value.to(x.dtype.element_ty))
    else:
        tl.store(at, value.to(x.dtype.element_ty), mask=_mask(rows, col, D, C, BD, EVEN, 0))


@triton.jit
def load_state(
    x, index, a, b, DA: tl.constexpr, DB: tl.constexpr, STRIDE_A: tl.constexpr, STRIDE_B: tl.constexpr, BA: tl.constexpr,
    BB: tl.constexpr,
):  # fmt: skip
    """[BA, BB] from (a, b) on of matrix `index` of x [matrices, DA * DB], read with the given strides; 0 outside."""
    i = a + tl.arange(0, BA)[:, None]
    j = b + tl.arange(0, BB)[None, :]
    at = x + index * (DA * DB) + (i * STRIDE_A + j * STRIDE_B)
    if DA % BA == 0 and DB % BB == 0:
        return tl.load(at)
    else:
        return tl.load(at, mask=(i < DA) & (j < DB), other=0.0)


@triton.jit
def store_state(x, value, index, a, b, DA: tl.constexpr, DB: tl.constexpr, BA: tl.constexpr, BB: tl.constexpr):
    i = a + tl.arange(0, BA)[:, None]
    j = b + tl.arange(0, BB)[None, :]
    at = x + index * (DA * DB) + (i * DB + j)
    if DA % BA == 0 and DB % BB == 0:
        tl.store(at, value.to(x.dtype.element_ty))
    else:
        tl.store(at, value.to(x.dtype.element_ty), mask=(i < DA) & (j < DB))


@triton.jit
def dot(a, b, acc, DT: tl.constexpr, PREC: tl.constexpr):
    """acc + a b with operands in DT and sums in float32; acc may be None."""
    a = a.to(DT)
    b = b.to(DT)
    if DT == tl.float32 and PREC == "tf32":
        a = nearest_tf32(a)
        b = nearest_tf32(b)
    return tl.dot(a, b, acc, input_precision=PREC)


@triton.jit
def nearest_tf32(x):
    """float32 x whose upper 10 bits, which are what a tf32 product reads of it, are rounded: tensor cores cut the others off.

    The NaN that arithmetic makes, 0x7fffffff, would overflow to a zero; so it is lowered first, to another NaN.
    """
    bits = tl.minimum(x.to(tl.int32, bitcast=True), 0x7FFFEFFF) + 0x1000
    if INTERPRETED:
        bits &= -0x2000  # as the tensor cores do
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def low_part(x, rounded):
    """What rounding to bfloat16 has left of float32 x, in bfloat16: together they hold 16 of its bits."""
    return (x - rounded.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def store_split(x, matrix, SIZE: tl.constexpr, at, value, SPLIT: tl.constexpr):
    """Writes value to the given matrix (of SIZE elements) of x and, of two SPLIT, what rounding has left of it to the next."""
    rounded = value.to(x.dtype.element_ty)
    tl.store(x + matrix * SIZE + at, rounded)
    if SPLIT == 2:
        tl.store(x + (matrix + 1) * SIZE + at, low_part(value, rounded))


@triton.jit
def dot_split(a, a_low, b, b_low, acc):
    """acc + (a + a_low)(b + b_low) of bfloat16 operands, but for the product of the low parts: at most 2^-18 of it all."""
    return tl.dot(a, b, tl.dot(a_low, b, tl.dot(a, b_low, acc)))


@triton.jit
def term_at(n, index, D: tl.constexpr, SPLIT: tl.constexpr):
    """(channel, left matrix, right matrix) at place n of a product over D channels of matrices that lie at `index` in SPLIT.

    Of high and low part there are three terms, one after the other: high times high, high times low, low times high.
    """
    if SPLIT == 2:
        term = n // D
        return n - term * D, index * 2 + (term == 2), index * 2 + (term == 1)
    else:
        return n, index, index


@triton.jit
def head_log_decay(
    gs, gamma, token, rows, seq, head, SHIFT: tl.constexpr, H: tl.constexpr, HGS: tl.constexpr, C: tl.constexpr,
    SIGN: tl.constexpr,
):  # fmt: skip
    """[C]: log decay of the whole head in row r + SHIFT of a chunk, from g [tokens, HGS] and g_gamma [N, H]; 0 outside."""
    r = tl.arange(0, C) + SHIFT
    total = tl.zeros([C], tl.float32)
    if gs is not None:
        at = gs + token * HGS + head // (H // HGS) + r * (SIGN * HGS)
        total += tl.load(at, mask=r < rows, other=0.0).to(tl.float32)
    if gamma is not None:
        total += tl.where(r < rows, tl.load(gamma + seq * H + head).to(tl.float32), 0.0)
    return clamped(total)


@triton.jit
def channel_log_decay(
    gate, gs, gamma, token, rows, seq, head, col, FOLD: tl.constexpr, H: tl.constexpr, HG: tl.constexpr, HGS: tl.constexpr,
    D: tl.constexpr, C: tl.constexpr, BD: tl.constexpr, SIGN: tl.constexpr, EVEN: tl.constexpr, WALKED: tl.constexpr = 0,
):  # fmt: skip
    """[C, BD]: log decay of each channel in each row; with FOLD that of the head is added to it. WALKED: see `load_rows`."""
    total = load_rows(gate, token, rows, head // (H // HG), col, HG, D, C, BD, SIGN, EVEN, WALKED).to(tl.float32)
    if FOLD:
        total += head_log_decay(gs, gamma, token, rows, seq, head, 0, H, HGS, C, SIGN)[:, None]
    return clamped(total)


@triton.jit
def upto(C: tl.constexpr):
    """[C, C]: 1 where column <= row."""
    r = tl.arange(0, C)
    return tl.where(r[None, :] <= r[:, None], 1.0, 0.0).to(tl.bfloat16)


@triton.jit
def after(C: tl.constexpr):
    """[C, C]: 1 where column > row."""
    r = tl.arange(0, C)
    return tl.where(r[None, :] > r[:, None], 1.0, 0.0).to(tl.bfloat16)


@triton.jit
def onwards(C: tl.constexpr):
    """[C, C]: 1 where column >= row, the transpose of `upto`."""
    r = tl.arange(0, C)
    return tl.where(r[None, :] >= r[:, None], 1.0, 0.0).to(tl.bfloat16)


@triton.jit
def before(C: tl.constexpr):
    """[C, C]: 1 where column < row, the transpose of `after`."""
    r = tl.arange(0, C)
    return tl.where(r[None, :] < r[:, None], 1.0, 0.0).to(tl.bfloat16)


@triton.jit
def sums_of_columns(x, which, GATE_PARTS: tl.constexpr):
    """x which in float32, like `sums`, for x [N, C]."""
    part = x.to(tl.bfloat16)
    total = tl.dot(part, which)
    if GATE_PARTS > 1:
        left = x - part.to(tl.float32)
        part = left.to(tl.bfloat16)
        total = tl.dot(part, which, total)
        if GATE_PARTS > 2:
            total = tl.dot((left - part.to(tl.float32)).to(tl.bfloat16), which, total)
    return total


@triton.jit
def sums(which, x, GATE_PARTS: tl.constexpr):
    """which x in float32: which is 0/1 [C, C] in bfloat16, x [C, N] float32, exact to GATE_PARTS * 8 bits."""
    part = x.to(tl.bfloat16)
    total = tl.dot(which, part)
    if GATE_PARTS > 1:
        left = x - part.to(tl.float32)
        part = left.to(tl.bfloat16)
        total = tl.dot(which, part, total)
        if GATE_PARTS > 2:
            total = tl.dot(which, (left - part.to(tl.float32)).to(tl.bfloat16), total)
    return total
