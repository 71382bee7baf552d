"""The decays of a whole head (g of rank 3, g_gamma) over one chunk.

Where products have float32's digits (EXACT) every log decay is summed over just the rows it spans, in the kernel that needs it.
Otherwise they are differences of one running sum of log decays clamped to -90, which `running_log_decays` makes once for all
kernels: a reset is still 0 (exp(-90) is), nothing is infinite, and the sums of 64 rows are right to 2^-24 of 64 * 90 at worst:
a tenth of bfloat16's rounding, and less than float16's. Without g a row's distance tells its decay, exactly.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ejkernel.kernels._triton.linear.kernels.tiles import chunk_at, clamped, exp_of_log, head_log_decay, program_at, sums, upto

RESET = tl.constexpr(-89.5)  # a difference of neighbouring running sums below it is a clamped step


@triton.jit
def constant_decay(gamma, seq, head, H: tl.constexpr):
    """The log decay that g_gamma gives every step of a head; 0 without it."""
    value = 0.0
    if gamma is not None:
        value = clamped(tl.load(gamma + seq * H + head).to(tl.float32))
    return value


@triton.jit
def _decay(log, EXACT: tl.constexpr):
    if EXACT:
        return tl.exp(log)
    else:
        return exp_of_log(log)


@triton.jit
def running_log_decays(
    gs, gamma, chunks, T, NT,
    running,
    H: tl.constexpr, HGS: tl.constexpr, C: tl.constexpr, BH: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    """Programs: tiles of BH heads * chunks. running [chunks, H, C]: sums of clamped log decays up to and with each row."""
    tile, _, s = program_at((H + BH - 1) // BH, 1)
    token, rows, seq = chunk_at(chunks, s, T, NT, C, SIGN)
    h = tile * BH + tl.arange(0, BH)[None, :]
    r = tl.arange(0, C)[:, None]
    here = (r < rows) & (h < H)
    total = tl.load(gs + (token + SIGN * r) * HGS + h // (H // HGS), mask=here, other=0.0).to(tl.float32)
    if gamma is not None:
        total += tl.load(gamma + seq * H + h, mask=here, other=0.0).to(tl.float32)
    tl.store(running + (s.to(tl.int64) * H + h) * C + r, tl.cumsum(clamped(total, -90.0), 0), mask=h < H)


@triton.jit
def head_decays(
    gs, gamma, constant, index, token, rows, seq, head, H: tl.constexpr, HGS: tl.constexpr, C: tl.constexpr, SIGN: tl.constexpr,
    EXACT: tl.constexpr,
):  # fmt: skip
    """(log decays for `decay_matrix` [C], decay up to and with each row [C], decay after it [C], decay of the chunk).

    gs: g itself where EXACT, else what `running_log_decays` made of g and gamma, of which row `index` is read; constant: of
    `constant_decay`, all that is read without g.
    """
    r = tl.arange(0, C)
    if gs is None:
        logs = tl.zeros([C], tl.float32)
        upto_row = tl.minimum(r + 1, rows) * constant
        after_row = tl.maximum(rows - 1 - r, 0) * constant
        whole = rows * constant
    elif EXACT:
        logs = head_log_decay(gs, gamma, token, rows, seq, head, 0, H, HGS, C, SIGN)
        following = head_log_decay(gs, gamma, token, rows, seq, head, 1, H, HGS, C, SIGN)
        upto_row = tl.cumsum(logs, 0)
        after_row = tl.cumsum(following, 0, reverse=True)
        whole = tl.sum(logs, 0)
    else:
        logs = tl.load(gs + index * C + r)
        upto_row = logs
        whole = tl.load(gs + index * C + (C - 1))
        after_row = whole - logs
    return logs, _decay(upto_row, EXACT), _decay(after_row, EXACT), tl.exp(whole)  # one number: nothing to save


@triton.jit
def decay_matrix(gs, logs, constant, TRANSPOSED: tl.constexpr, C: tl.constexpr, EXACT: tl.constexpr):
    """[C, C]: the decay from row s to row t of a head, 0 for s > t; element [t, s], or [s, t] when TRANSPOSED.

    logs [C]: what `head_decays` gave; not read without g.
    """
    if TRANSPOSED:
        t = tl.arange(0, C)[None, :]
        s = tl.arange(0, C)[:, None]
    else:
        t = tl.arange(0, C)[:, None]
        s = tl.arange(0, C)[None, :]
    if gs is None:
        between = (t - s) * constant
    elif EXACT:
        r = tl.arange(0, C)
        between = sums(upto(C), tl.where(r[:, None] > r[None, :], logs[:, None], 0.0), 3)
        if TRANSPOSED:
            between = tl.trans(between)
    elif TRANSPOSED:
        between = logs[None, :] - logs[:, None]
    else:
        between = logs[:, None] - logs[None, :]
    return tl.where(t >= s, _decay(between, EXACT), 0.0)


@triton.jit
def not_reset(gs, index, C: tl.constexpr):
    """[C]: False in rows whose decay is a reset, by what `running_log_decays` made.

    The gradient of such a decay is 0: what is found of it is rounding.
    """
    r = tl.arange(0, C)
    before = tl.load(gs + index * C + r - 1, mask=r > 0, other=0.0)
    return tl.load(gs + index * C + r) - before > RESET
