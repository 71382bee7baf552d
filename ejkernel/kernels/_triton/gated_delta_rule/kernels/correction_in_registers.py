"""`delta_correction` from scores that are there, with its products in registers: from the first to the last nothing is exchanged.

A warp's product of 16 x 16 blocks leaves, as its sum, rows t / 4 and columns 2 (t % 4), 2 (t % 4) + 1 in thread t. That is also how
the next product can take its left operand, and the transpose of its right one: the sum over channels may go in any order, if both
operands have the same. So every block is kept as it is (left) or transposed (right), and a product whose operands change places
gives the transpose of its result:

    a b = product(a, b^T),   (a b)^T = product(b^T, a)

Scores and beta come through shared memory once, where both forms are read from; Z is made transposed and goes out by the same way.
"""

# mypy: disable-error-code="assignment,misc"
# ruff: noqa: RUF005  (Triton knows tuples and their sums, but not iterable unpacking; their length changes on the way)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2

from ejkernel.kernels._triton.linear.kernels.tiles import chunk_at, program_at, put
from ejkernel.kernels._triton.linear.kernels.warpgroups import copy_async, warpgroup_barrier

SUM = gl.constexpr(gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8]))
LEFT = gl.constexpr(gl.DotOperandLayout(0, SUM, 1))
RIGHT = gl.constexpr(gl.DotOperandLayout(1, SUM, 1))
MEMORY = gl.constexpr(gl.BlockedLayout([1, 8], [16, 2], [1, 1], [1, 0]))  # 16 bytes a thread
SLOTS = gl.constexpr(gl.SwizzledSharedLayout(8, 4, 2, [1, 0]))  # 8 rows, of 16 bytes each, without a bank twice


@gluon.jit
def _as_summed(x):
    """[16, 16] with its columns in the order in which a product adds up what SUM holds: even ones of each eight, then odd ones."""
    return gl.reshape(gl.permute(gl.reshape(x, (16, 2, 4, 2)), (0, 1, 3, 2)), (16, 16))


@gluon.jit
def _left(x):
    """x for a left operand that is wanted otherwise, too. The four numbers that a left operand has in registers side by side are
    not in a sum's order, and are added to 0 (which they are not known to stay the same by) as they are put in place; copied they
    would be once for each half of every product."""
    return x + 0.0


@gluon.jit
def _product(a, transposed, total):
    """total + a b, b given transposed. Bits that tf32 has no room for are cut off, as in `correction._dot`."""
    left = gl.convert_layout(_as_summed(a), LEFT, assert_trivial=True)
    right = gl.convert_layout(gl.permute(_as_summed(transposed), (1, 0)), RIGHT, assert_trivial=True)
    return mma_v2(left, right, total, input_precision="tf32")


@gluon.constexpr_function
def _at(i, j):
    """Where block (i, j), j <= i, stands: one row of blocks after the other."""
    return i * (i + 1) // 2 + j


@gluon.jit
def _slots(COUNT: gl.constexpr):
    """Memory for so many blocks. An allocation each: between two accesses to one, some compilers put a barrier."""
    slots = ()
    for _ in gl.static_range(COUNT):
        slots = slots + (gl.allocate_shared_memory(gl.bfloat16, [16, 16], SLOTS),)
    return slots


@gluon.jit
def _copy_blocks(x, slots, index, C: gl.constexpr):
    """Starts to copy the blocks on and below the diagonal of matrix `index` of x [matrices, C, C] to slots."""
    t = gl.arange(0, 16, gl.SliceLayout(1, MEMORY))[:, None]
    s = gl.arange(0, 16, gl.SliceLayout(0, MEMORY))[None, :]
    for i in gl.static_range(C // 16):
        for j in gl.static_range(i + 1):
            copy_async(slots[_at(i, j)], x + index * (C * C) + ((i * 16 + t) * C + (j * 16 + s)))


@gluon.jit
def _scores(slots, n: gl.constexpr, TRANSPOSED: gl.constexpr):
    """[16, 16] in float32: what is in a slot."""
    block = slots[n]
    if TRANSPOSED:
        block = block.permute((1, 0))
    return block.load(SUM).to(gl.float32)


@gluon.jit
def _whole(slots, low, n: gl.constexpr, TRANSPOSED: gl.constexpr):
    """[16, 16] in float32: the n-th block of the scores, high and low part together."""
    found = _scores(slots, n, TRANSPOSED)
    if low is not None:
        found += _scores(low, n, TRANSPOSED)
    return found


@gluon.jit
def _inverses(own, own_t, minus, N: gl.constexpr):
    """(I + W)^-1 of N blocks W = own * beta, strictly lower triangular, as `correction._inverse` makes it. own_t: transposed;
    minus: -beta of all rows, in shared memory."""
    r = gl.arange(0, 16, gl.SliceLayout(1, SUM))[:, None]
    c = gl.arange(0, 16, gl.SliceLayout(0, SUM))[None, :]
    none = gl.zeros([16, 16], gl.float32, SUM)
    W = ()  # -W
    X = ()
    X_t = ()
    for i in gl.static_range(N):
        factors = minus.slice(16 * i, 16)
        W = W + (own[i] * factors.load(gl.SliceLayout(0, SUM))[None, :],)
        W_t = own_t[i] * factors.load(gl.SliceLayout(1, SUM))[:, None]
        X = X + (gl.where(r == c, 1.0, gl.where((r ^ c) == 1, W[i], 0.0)),)
        X_t = X_t + (gl.where(r == c, 1.0, gl.where((r ^ c) == 1, W_t, 0.0)),)
    for level in gl.static_range(1, 4):
        for i in gl.static_range(N):
            met = gl.where(((r ^ c) >> level) == 1, W[i], 0.0)
            met_t = _product(_left(X_t[i]), met, none)
            further = _left(X[i])
            if level < 3:
                X_t = put(X_t, i, _product(_left(met_t), X[i], X_t[i]))
            X = put(X, i, _product(further, met_t, X[i]))
    return X


@gluon.jit
def delta_correction_in_registers(
    beta, M, M_low, chunks, T, NT,
    Z, betas,
    H: gl.constexpr, C: gl.constexpr, SIGN: gl.constexpr,
):  # fmt: skip
    """Programs of one warp: chunks * heads. Arguments as of `delta_correction`: M and its low part, if there is one, are given."""
    N: gl.constexpr = C // 16
    BLOCKS: gl.constexpr = N * (N + 1) // 2
    _tile, head, s = program_at(1, H)
    token, rows, _seq = chunk_at(chunks, s, T, NT, C, SIGN)
    if rows <= 0:
        return
    index = s.to(gl.int64) * H + head
    slots = _slots(BLOCKS)
    results = _slots(BLOCKS)
    minus = gl.allocate_shared_memory(gl.float32, [C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    _copy_blocks(M, slots, index, C)
    low = None
    if M_low is not None:
        low = _slots(BLOCKS)
        _copy_blocks(M_low, low, index, C)
    async_copy.commit_group()
    r = gl.arange(0, C, gl.BlockedLayout([C // 32], [32], [1], [0]))
    factor = gl.load(beta + (token + SIGN * r) * H + head, mask=r < rows, other=0.0).to(gl.float32)
    gl.store(betas + index * C + r, factor)
    minus.store(-factor)
    async_copy.wait_group(0)
    warpgroup_barrier()

    t = gl.arange(0, 16, gl.SliceLayout(1, SUM))[:, None]
    u = gl.arange(0, 16, gl.SliceLayout(0, SUM))[None, :]
    own = ()  # the scores' blocks on the diagonal
    own_t = ()
    for i in gl.static_range(N):
        own = own + (gl.where(t > u, _whole(slots, low, _at(i, i), False), 0.0),)
        own_t = own_t + (gl.where(t < u, _whole(slots, low, _at(i, i), True), 0.0),)
    X = _inverses(own, own_t, minus, N)

    # Z_ij = X_i (M_ij - sum over n of M_in beta_n Z_nj), all transposed.
    none = gl.zeros([16, 16], gl.float32, SUM)
    Z_t = ()
    for i in gl.static_range(N):
        weighted = ()  # -M_in beta_n
        for n in gl.static_range(i):
            factors = minus.slice(16 * n, 16).load(gl.SliceLayout(0, SUM))[None, :]
            weighted = weighted + (_whole(slots, low, _at(i, n), False) * factors,)
        for j in gl.static_range(i):
            total = none
            if low is not None:
                total = _scores(low, _at(i, j), True)
            for n in gl.static_range(j, i):
                total = _product(_left(Z_t[_at(n, j)]), weighted[n], total)
            total += _scores(slots, _at(i, j), True)
            Z_t = Z_t + (_product(total, X[i], none),)
        Z_t = Z_t + (_product(own_t[i], X[i], none),)
    for n in gl.static_range(BLOCKS):
        results[n].permute((1, 0)).store(Z_t[n].to(gl.bfloat16))
    warpgroup_barrier()
    to = gl.arange(0, 16, gl.SliceLayout(1, MEMORY))[:, None]
    so = gl.arange(0, 16, gl.SliceLayout(0, MEMORY))[None, :]
    for i in gl.static_range(N):
        for j in gl.static_range(i + 1):
            at = Z + index * (C * C) + ((i * 16 + to) * C + (j * 16 + so))
            gl.store(at, results[_at(i, j)].load(MEMORY))
