"""How the rows of a chunk correct each other's errors: the one part of the delta rule that linear attention does not have.

With M[t, s] = k_t . k_s times the decay from s to t, for s < t, the errors E of a chunk are those against the state before it,
R, less what the rows before each have written: E = R - M (beta E). Hence

    E = R - Z (beta R),   Z = (I + M beta)^-1 M

Z is strictly lower triangular, so a row's own R is never rounded by the product, and nothing is divided by beta. Going back in
time the adjoints obey the same with Z^T.

A program is one warp, and everything it makes are blocks of 16 x 16: nothing waits for other warps, and many programs hide each
other's latency. (As products of whole tiles by four warps the same took 1.7 times as long.)
"""

# mypy: disable-error-code="assignment,var-annotated,misc"
# ruff: noqa: RUF005  (Triton knows tuples and their sums, but not iterable unpacking; their length changes on the way)
from __future__ import annotations

import triton
import triton.language as tl

from ejkernel.kernels._triton.linear.kernels.tiles import (
    INTERPRETED,
    chunk_at,
    clamped,
    dot,
    exp_of_log,
    load_rows,
    program_at,
    put,
    sums,
    upto,
)


@triton.jit
def load_per_head(x, token, rows, head, H: tl.constexpr, C: tl.constexpr, SIGN: tl.constexpr):
    """[C] in float32: a chunk's rows of x [tokens, H] in one head; 0 outside."""
    r = tl.arange(0, C)
    return tl.load(x + (token + SIGN * r) * H + head, mask=r < rows, other=0.0).to(tl.float32)


@triton.jit
def _block(x, index, i: tl.constexpr, j: tl.constexpr, C: tl.constexpr):
    """Where block (i, j) of matrix `index` of x [matrices, C, C] lies."""
    t = i * 16 + tl.arange(0, 16)[:, None]
    s = j * 16 + tl.arange(0, 16)[None, :]
    return x + index * (C * C) + (t * C + s)


@triton.jit
def load_lower(x, index, C: tl.constexpr):
    """[C, C]: matrix `index` of x [matrices, C, C], of which blocks of 16 x 16 above the diagonal are 0 and not in memory."""
    t = tl.arange(0, C)[:, None]
    s = tl.arange(0, C)[None, :]
    return tl.load(x + index * (C * C) + (t * C + s), mask=t // 16 >= s // 16, other=0.0)


@triton.jit
def load_key_scores(x, index, C: tl.constexpr):
    """[C, C] in float64: matrix `index` of x [matrices, 2, C, C], a high and a low part."""
    return load_lower(x, index * 2, C).to(tl.float64) + load_lower(x, index * 2 + 1, C).to(tl.float64)


@triton.jit
def _store_key_scores(x, block, index, i: tl.constexpr, j: tl.constexpr, C: tl.constexpr):
    """Block (i, j) of what `load_key_scores` reads."""
    high = block.to(tl.float32)
    tl.store(_block(x, index * 2, i, j, C), high)
    tl.store(_block(x, index * 2 + 1, i, j, C), (block - high).to(tl.float32))


@triton.constexpr_function
def _at(i, j):
    """Where block (i, j), j <= i, stands in a tuple with one row of blocks after the other."""
    return i * (i + 1) // 2 + j


@triton.jit
def _products(
    q, k, token, rows, head, HK: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, N: tl.constexpr, SIGN: tl.constexpr,
    EVEN: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Blocks (i, j), j <= i < N, of k k^T and, with q, of q k^T for a chunk's rows of both [tokens, HK, K], one row of blocks
    after the other. Both in one turn over the channels: what a program waits for is memory, so all of it is asked for early.

    EXACT: k k^T in float64. Where keys are alike its roundings all point the same way, and a chunk's rows add them up.
    """
    KEYS: tl.constexpr = tl.float64 if EXACT else DT
    of_keys = ()
    of_queries = ()
    for _ in tl.static_range(N * (N + 1) // 2):
        of_keys = of_keys + (tl.zeros([16, 16], tl.float64 if EXACT else tl.float32),)
        if q is not None:
            of_queries = of_queries + (tl.zeros([16, 16], tl.float32),)
    for c in tl.range(0, K, BK, num_stages=STAGES):
        keys = ()
        for i in tl.static_range(N):
            keys = keys + (load_rows(k, token + SIGN * 16 * i, rows - 16 * i, head, c, HK, K, 16, BK, SIGN, EVEN),)
        for i in tl.static_range(N):
            if q is not None:
                query = load_rows(q, token + SIGN * 16 * i, rows - 16 * i, head, c, HK, K, 16, BK, SIGN, EVEN)
            for j in tl.static_range(i + 1):
                right = tl.trans(keys[j].to(DT))
                total = tl.dot(
                    keys[i].to(KEYS), right.to(KEYS), of_keys[_at(i, j)], input_precision="ieee" if EXACT else PREC,
                    out_dtype=tl.float64 if EXACT else tl.float32,
                )  # fmt: skip
                of_keys = put(of_keys, _at(i, j), total)
                if q is not None:
                    of_queries = put(of_queries, _at(i, j), dot(query, right, of_queries[_at(i, j)], DT, PREC))
    return of_keys, of_queries


@triton.jit
def _betas(beta, token, rows, head, H: tl.constexpr, N: tl.constexpr, SIGN: tl.constexpr):
    """Beta of every block's rows, N times [16]; not one by one between stores, behind each of which the next would wait."""
    found = ()
    for i in tl.static_range(N):
        found = found + (load_per_head(beta, token + SIGN * 16 * i, rows - 16 * i, head, H, 16, SIGN),)
    return found


@triton.jit
def _running(gs, index, C: tl.constexpr, EXACT: tl.constexpr):
    """Running sums of log decays of every block's rows, [16] each, as `_decay` reads them."""
    found = ()
    if gs is not None and not EXACT:
        for i in tl.static_range(C // 16):
            found = found + (tl.load(gs + index * C + 16 * i + tl.arange(0, 16)),)
    return found


@triton.jit
def _decay(
    gs, running, token, rows, head, i: tl.constexpr, j: tl.constexpr, H: tl.constexpr, HGS: tl.constexpr, SIGN: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """[16, 16]: the decay from row s of block j to row t of block i, 0 for s > t.

    EXACT: log decays, of gs, are summed over just the rows they span. Otherwise they are differences of running sums.
    """
    r = tl.arange(0, 16)
    if EXACT:
        at = gs + token * HGS + head // (H // HGS)
        logs = tl.load(at + (i * 16 + r) * (SIGN * HGS), mask=i * 16 + r < rows, other=0.0).to(tl.float32)
        logs = clamped(logs)
        if i == j:
            between = sums(upto(16), tl.where(r[:, None] > r[None, :], logs[:, None], 0.0), 3)
        else:
            after = j * 16 + r + 1  # of the block's own rows those after s, then whole blocks
            following = tl.load(at + after * (SIGN * HGS), mask=(after < rows) & (r < 15), other=0.0).to(tl.float32)
            between = tl.cumsum(logs, 0)[:, None] + tl.cumsum(clamped(following), 0, reverse=True)[None, :]
            for n in tl.static_range(j + 1, i):
                whole = tl.load(at + (n * 16 + r) * (SIGN * HGS), mask=n * 16 + r < rows, other=0.0).to(tl.float32)
                between += tl.sum(clamped(whole), 0)
        decay = tl.exp(between)
    else:
        decay = exp_of_log(running[i][:, None] - running[j][None, :])
    if i == j:
        decay = tl.where(r[:, None] >= r[None, :], decay, 0.0)
    return decay


@triton.jit
def _dot(a, b, PREC: tl.constexpr):
    """a b of float32 blocks. Where tf32 will do, the bits of an operand that it does not read are cut off, not rounded: at most
    half of what rounding the result to bfloat16 costs, and 0.102 ms for 0.120 (benchmarks/NOTES_gpu.md)."""
    if INTERPRETED and PREC == "tf32":  # as the tensor cores do
        a = (a.to(tl.int32, bitcast=True) & -0x2000).to(tl.float32, bitcast=True)
        b = (b.to(tl.int32, bitcast=True) & -0x2000).to(tl.float32, bitcast=True)
    return tl.dot(a, b, input_precision=PREC)


@triton.jit
def _inverse(W, PREC: tl.constexpr):
    """(I + W)^-1 for W [16, 16] strictly lower triangular, by doubling blocks: [[X1, 0], [-X2 W21 X1, X2]].

    A sum of powers of W, the usual way, loses every digit where keys are alike and beta is near 2.
    """
    t = tl.arange(0, 16)[:, None]
    s = tl.arange(0, 16)[None, :]
    X = tl.where(t == s, 1.0, 0.0) - tl.where((t ^ s) == 1, W, 0.0)
    for level in tl.static_range(1, 4):
        met = tl.where(((t ^ s) >> level) == 1, W, 0.0)
        X -= _dot(X, _dot(met, X, PREC), PREC)
    return X


@triton.jit
def delta_correction(
    q, k, gs, beta, M, M_low, chunks, scale, T, NT,
    Z, scores, key_scores, betas,
    H: tl.constexpr, HK: tl.constexpr, HGS: tl.constexpr, K: tl.constexpr, BK: tl.constexpr, C: tl.constexpr,
    SIGN: tl.constexpr, EVEN: tl.constexpr, DT: tl.constexpr, PREC: tl.constexpr, EXACT: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Programs of one warp: chunks * heads. Z [chunks, H, C, C].

    M, M_low [chunks, H, C, C]: the scores of keys with keys and, where it matters, their low part; None with one gate per head
    or none, where they are made here, and with them, if asked for, those of queries with keys: scores [chunks, H, C, C],
    scaled, 0 for s > t. A scan that makes those itself asks for none, and no query is read: half of the bytes.
    gs: as `head_decays` reads it. key_scores [chunks, H, 2, C, C]: M as it is multiplied, 0 for s >= t, a high and a low part,
    if asked for. betas [chunks, H, C]: beta in float32, row by row of a chunk: what the scans can have copied to shared memory
    before they need it.
    Blocks of 16 x 16 above the diagonal are not written, and `load_lower` does not read them.
    """
    N: tl.constexpr = C // 16
    _, head, s = program_at(1, H)
    token, rows, _ = chunk_at(chunks, s, T, NT, C, SIGN)
    if rows <= 0:
        return
    index = s.to(tl.int64) * H + head
    kv = head // (H // HK)
    r = tl.arange(0, 16)
    below = r[:, None] > r[None, :]
    if scores is None:  # with scores of queries there are too few registers to ask for them now
        factors = _betas(beta, token, rows, head, H, N, SIGN)
        if M is None:
            running = _running(gs, index, C, EXACT)
    blocks = ()  # (i, j), j <= i, of the scores of keys with keys, one row of blocks after the other
    if M is not None:
        for i in tl.static_range(N):
            for j in tl.static_range(i + 1):
                one = tl.load(_block(M, index, i, j, C)).to(tl.float32)
                if M_low is not None:
                    one += tl.load(_block(M_low, index, i, j, C)).to(tl.float32)
                blocks = blocks + (one,)
    else:
        blocks, of_queries = _products(q, k, token, rows, kv, HK, K, BK, N, SIGN, EVEN, DT, PREC, EXACT, STAGES)
        if scores is not None:
            running = _running(gs, index, C, EXACT)
        for i in tl.static_range(N):
            for j in tl.static_range(i + 1):
                if gs is not None:
                    decay = _decay(gs, running, token, rows, head, i, j, H, HGS, SIGN, EXACT)
                    blocks = put(blocks, _at(i, j), blocks[_at(i, j)] * decay)
                if scores is not None:
                    one = of_queries[_at(i, j)] * scale
                    if gs is not None:
                        one *= decay
                    elif i == j:
                        one = tl.where(r[:, None] >= r[None, :], one, 0.0)
                    tl.store(_block(scores, index, i, j, C), one.to(scores.dtype.element_ty))
    if scores is not None:
        factors = _betas(beta, token, rows, head, H, N, SIGN)
    # Z_ij = X_i (M_ij - sum over n of M_in beta_n Z_nj), X_i the inverse of a diagonal block, column by column.
    diagonal = ()
    inverses = ()
    for i in tl.static_range(N):
        own = tl.where(below, blocks[_at(i, i)], 0.0)
        if key_scores is not None:
            _store_key_scores(key_scores, own, index, i, i, C)
            for j in tl.static_range(i):
                _store_key_scores(key_scores, blocks[_at(i, j)], index, i, j, C)
                blocks = put(blocks, _at(i, j), blocks[_at(i, j)].to(tl.float32))
            own = own.to(tl.float32)
        tl.store(betas + index * C + 16 * i + r, factors[i])
        diagonal = diagonal + (own,)
        inverses = inverses + (_inverse(own * factors[i][None, :], PREC),)
    for j in tl.static_range(N):
        column = (_dot(inverses[j], diagonal[j], PREC),)
        tl.store(_block(Z, index, j, j, C), column[0].to(Z.dtype.element_ty))
        for i in tl.static_range(j + 1, N):
            total = blocks[_at(i, j)]
            for n in tl.static_range(j, i):
                total -= _dot(blocks[_at(i, n)] * factors[n][None, :], column[n - j], PREC)
            found = _dot(inverses[i], total, PREC)
            column = column + (found,)
            tl.store(_block(Z, index, i, j, C), found.to(Z.dtype.element_ty))
