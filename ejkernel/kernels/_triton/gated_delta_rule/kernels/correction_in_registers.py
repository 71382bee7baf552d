"""`delta_correction` of scores that are there, in registers: between its products a warp exchanges nothing.

Of a sum of 16 x 16 numbers a thread of the warp holds rows t / 4 and 8 further, columns 2 (t % 4), the next one, and both 8
further. A product could take both of its operands like that, the right one transposed, if it added up its channels in another
order: the even ones of every eight before the odd ones. Nothing but that order is changed, in both operands. So a block is kept
as it is or transposed, and a product gives the one or the other, by the place of its operands:

    a b = product(a, b^T),   (a b)^T = product(b^T, a)

The scores come through shared memory, from where both forms are read. Z is made transposed and goes out by the same way.
"""

# mypy: disable-error-code="assignment,misc"
# ruff: noqa: RUF005  (Triton knows tuples and their sums, but not iterable unpacking; their length changes on the way)
from __future__ import annotations

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from ejkernel.kernels._triton.linear.kernels.tiles import chunk_at, program_at, put
from ejkernel.kernels._triton.linear.kernels.warpgroups import copy_async, warpgroup_barrier

SUM = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, SUM, 1))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, SUM, 1))
ROWS = gl.constexpr(gl.SliceLayout(1, SUM))
COLUMNS = gl.constexpr(gl.SliceLayout(0, SUM))
MEMORY = gl.constexpr(gl.BlockedLayout([1, 8], [16, 2], [1, 1], [1, 0]))  # 16 bytes a thread
SLOT = gl.constexpr(gl.SwizzledSharedLayout(8, 4, 2, [1, 0]))  # eight rows of 16 bytes lie in all banks


@triton.constexpr_function
def _at(i, j):
    """Where block (i, j), j <= i, stands in a tuple with one row of blocks after the other."""
    return i * (i + 1) // 2 + j


@gluon.jit
def _even_first(x):
    """[16, 16], of every eight columns the even ones first: in a product's order of channels, what a sum's layout holds."""
    return gl.reshape(gl.permute(gl.reshape(x, (16, 2, 4, 2)), (0, 1, 3, 2)), (16, 16))


@gluon.jit
def _product(a, transposed, total):
    """total + a b for b given transposed. Bits that tf32 has no room for are cut off, as in `correction._dot`."""
    left = gl.convert_layout(_even_first(a), LEFT, assert_trivial=True)
    right = gl.convert_layout(gl.permute(_even_first(transposed), (1, 0)), RIGHT, assert_trivial=True)
    return mma_v2(left, right, total, input_precision="tf32")


@gluon.jit
def _as_left(x):
    """x, for the left operand alone. That takes four registers in a row in another order than a sum has them, and the compiler
    would copy them once for each half of every product: 2130 instructions for 1810. A number plus 0 it writes where it belongs.
    """
    return x + 0.0


@gluon.jit
def _slots(COUNT: gl.constexpr):
    """Shared memory for so many blocks. Each for itself: between two accesses to the same memory Triton 3.6 puts a barrier."""
    slots = ()
    for _ in gl.static_range(COUNT):
        slots = slots + (gl.allocate_shared_memory(gl.bfloat16, [16, 16], SLOT),)
    return slots


@gluon.jit
def _block(x, index, i: gl.constexpr, j: gl.constexpr, C: gl.constexpr):
    """Where block (i, j) of matrix `index` of x [matrices, C, C] lies."""
    t = i * 16 + gl.arange(0, 16, gl.SliceLayout(1, MEMORY))[:, None]
    s = j * 16 + gl.arange(0, 16, gl.SliceLayout(0, MEMORY))[None, :]
    return x + index * (C * C) + (t * C + s)


@gluon.jit
def _copy_lower(x, slots, index, C: gl.constexpr):
    """Starts to copy the blocks on and below the diagonal of matrix `index` of x [matrices, C, C]."""
    for i in gl.static_range(C // 16):
        for j in gl.static_range(i + 1):
            copy_async(slots[_at(i, j)], _block(x, index, i, j, C))


@gluon.jit
def _load(slot, TRANSPOSED: gl.constexpr):
    if TRANSPOSED:
        return slot.permute((1, 0)).load(SUM).to(gl.float32)
    else:
        return slot.load(SUM).to(gl.float32)


@gluon.jit
def _scores(high, low, n: gl.constexpr, TRANSPOSED: gl.constexpr):
    """[16, 16] in float32: the n-th block of both parts together."""
    found = _load(high[n], TRANSPOSED)
    if low is not None:
        found += _load(low[n], TRANSPOSED)
    return found


@gluon.jit
def _inverses(own, own_t, minus, N: gl.constexpr):
    """(I + W)^-1 of N blocks W = own beta, as `correction._inverse` makes it; level by level of all of them, since one alone
    would wait for every product. own_t: transposed. minus: -beta of all rows, in shared memory."""
    r = gl.arange(0, 16, ROWS)[:, None]
    c = gl.arange(0, 16, COLUMNS)[None, :]
    W = ()  # -W
    X = ()
    X_t = ()
    for i in gl.static_range(N):
        factors = minus.slice(16 * i, 16)
        W = W + (own[i] * factors.load(COLUMNS)[None, :],)
        W_t = own_t[i] * factors.load(ROWS)[:, None]
        X = X + (gl.where(r == c, 1.0, gl.where((r ^ c) == 1, W[i], 0.0)),)
        X_t = X_t + (gl.where(r == c, 1.0, gl.where((r ^ c) == 1, W_t, 0.0)),)
    none = gl.zeros([16, 16], gl.float32, SUM)
    for level in gl.static_range(1, 4):
        for i in gl.static_range(N):
            met = gl.where(((r ^ c) >> level) == 1, W[i], 0.0)
            met_t = _product(_as_left(X_t[i]), met, none)  # (met X)^T
            left = _as_left(X[i])
            if level < 3:
                X_t = put(X_t, i, _product(_as_left(met_t), X[i], X_t[i]))
            X = put(X, i, _product(left, met_t, X[i]))
    return X


@gluon.jit
def delta_correction_in_registers(
    beta, M, M_low, chunks, T, NT,
    Z, betas,
    H: gl.constexpr, C: gl.constexpr, SIGN: gl.constexpr,
):  # fmt: skip
    """Programs of one warp: chunks * heads. Z [chunks, H, C, C], betas [chunks, H, C] and arguments as of `delta_correction`; M
    is given, M_low may be None."""
    N: gl.constexpr = C // 16
    BLOCKS: gl.constexpr = N * (N + 1) // 2
    _tile, head, s = program_at(1, H)
    token, rows, _seq = chunk_at(chunks, s, T, NT, C, SIGN)
    if rows <= 0:
        return
    index = s.to(gl.int64) * H + head
    high = _slots(BLOCKS)
    results = _slots(BLOCKS)
    minus = gl.allocate_shared_memory(gl.float32, [C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    _copy_lower(M, high, index, C)
    low = None
    if M_low is not None:
        low = _slots(BLOCKS)
        _copy_lower(M_low, low, index, C)
    async_copy.commit_group()
    r = gl.arange(0, C, gl.BlockedLayout([C // 32], [32], [1], [0]))
    factors = gl.load(beta + (token + SIGN * r) * H + head, mask=r < rows, other=0.0).to(gl.float32)
    gl.store(betas + index * C + r, factors)
    minus.store(-factors)
    async_copy.wait_group(0)
    warpgroup_barrier()

    t = gl.arange(0, 16, ROWS)[:, None]
    u = gl.arange(0, 16, COLUMNS)[None, :]
    own = ()  # of the blocks on the diagonal what counts
    own_t = ()
    for i in gl.static_range(N):
        own = own + (gl.where(t > u, _scores(high, low, _at(i, i), False), 0.0),)
        own_t = own_t + (gl.where(t < u, _scores(high, low, _at(i, i), True), 0.0),)
    X = _inverses(own, own_t, minus, N)

    # Z_ij = X_i (M_ij - sum over n of M_in beta_n Z_nj), transposed, row by row of blocks.
    none = gl.zeros([16, 16], gl.float32, SUM)
    Z_t = ()
    for i in gl.static_range(N):
        weighted = ()  # -M_in beta_n
        for n in gl.static_range(i):
            weighted = weighted + (_scores(high, low, _at(i, n), False) * minus.slice(16 * n, 16).load(COLUMNS)[None, :],)
        for j in gl.static_range(i):
            total = none
            if low is not None:
                total = _load(low[_at(i, j)], True)
            for n in gl.static_range(j, i):
                total = _product(_as_left(Z_t[_at(n, j)]), weighted[n], total)
            total += _load(high[_at(i, j)], True)  # last, since what comes of an addition is a left operand at once
            Z_t = Z_t + (_product(total, X[i], none),)
        Z_t = Z_t + (_product(own_t[i], X[i], none),)
    for n in gl.static_range(BLOCKS):
        results[n].permute((1, 0)).store(Z_t[n].to(gl.bfloat16))
    warpgroup_barrier()
    for i in gl.static_range(N):
        for j in gl.static_range(i + 1):
            gl.store(_block(Z, index, i, j, C), results[_at(i, j)].load(MEMORY))
