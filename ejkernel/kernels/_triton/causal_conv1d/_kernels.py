"""The short causal convolution: z_t = sum_j w_j x_{t-W+1+j} + bias, y = z or silu(z), forward and backward.

Rows are the tokens of all sequences one after the other. `place[t]` is a token's place in its sequence (None: t mod T), so that
the input `back` tokens earlier counts where place[t] >= back; -1 after the last sequence, where y is 0. A program has BT rows
of BC channels at a time; taps are read again from the inner cache, so that each array crosses the memory bus once.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _place(place, row, ROWS: tl.constexpr, T: tl.constexpr):
    """[BT]: the rows' places in their sequences, negative for those that are in none."""
    if place is None:
        return tl.where((row >= 0) & (row < ROWS), row % T, -1)
    return tl.load(place + row, mask=(row >= 0) & (row < ROWS), other=-1)


@triton.jit
def _input(x, place, row, channel, back, ROWS: tl.constexpr, T: tl.constexpr, C: tl.constexpr):
    """Inputs [BT, BC] `back` tokens before the rows, of their own sequence, in float32."""
    mask = (_place(place, row, ROWS, T) >= back)[:, None] & (channel < C)[None, :]
    return tl.load(x + (row - back).to(tl.int64)[:, None] * C + channel[None, :], mask=mask, other=0).to(tl.float32)


@triton.jit
def _slope(
    x, w, bias, place, dy, row, channel,
    ROWS: tl.constexpr, T: tl.constexpr, C: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """dz [BT, BC] of the rows; 0 for those that are in no sequence."""
    inside = (_place(place, row, ROWS, T) >= 0)[:, None] & (channel < C)[None, :]
    d = tl.load(dy + row.to(tl.int64)[:, None] * C + channel[None, :], mask=inside, other=0).to(tl.float32)
    if SILU:
        z = _sum(x, w, bias, place, row, channel, ROWS, T, C, W)
        s = 1 / (1 + tl.exp(-z))
        d *= s * (1 + z * (1 - s))
    return d


@triton.jit
def _sum(x, w, bias, place, row, channel, ROWS: tl.constexpr, T: tl.constexpr, C: tl.constexpr, W: tl.constexpr):
    """z [BT, BC]."""
    z = _input(x, place, row, channel, W - 1, ROWS, T, C) * _tap(w, 0, channel, C)
    for j in tl.static_range(1, W):
        z += _input(x, place, row, channel, W - 1 - j, ROWS, T, C) * _tap(w, j, channel, C)
    if bias is not None:
        z += tl.load(bias + channel, mask=channel < C, other=0).to(tl.float32)[None, :]
    return z


@triton.jit
def _tap(w, j, channel, C: tl.constexpr):
    return tl.load(w + j * C + channel, mask=channel < C, other=0).to(tl.float32)[None, :]


@triton.jit
def convolve(
    x, w, bias, place, y,
    ROWS: tl.constexpr, T: tl.constexpr, C: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Programs: channel tiles * row tiles."""
    tiles: tl.constexpr = (C + BC - 1) // BC
    channel = tl.program_id(0) % tiles * BC + tl.arange(0, BC)
    row = tl.program_id(0) // tiles * BT + tl.arange(0, BT)
    z = _sum(x, w, bias, place, row, channel, ROWS, T, C, W)
    if SILU:
        z = z / (1 + tl.exp(-z))
    z = tl.where((_place(place, row, ROWS, T) >= 0)[:, None], z, 0)
    at = row.to(tl.int64)[:, None] * C + channel[None, :]
    tl.store(y + at, z.to(y.dtype.element_ty), mask=(row < ROWS)[:, None] & (channel < C)[None, :])


@triton.jit
def convolve_back(
    x, w, bias, place, dy, dx, dw, dbias,
    ROWS: tl.constexpr, T: tl.constexpr, C: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr, WP: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Programs: channel tiles * groups of TILES row tiles; dw [groups, W, C] and dbias [groups, C] are each group's own sums.

    WP: a power of two from W on.
    """
    tiles: tl.constexpr = (C + BC - 1) // BC
    channel = tl.program_id(0) % tiles * BC + tl.arange(0, BC)
    group = tl.program_id(0) // tiles
    tap = tl.arange(0, WP)
    dws, db = tl.zeros([WP, BC], tl.float32), tl.zeros([BC], tl.float32)
    for i in range(TILES):
        row = (group * TILES + i) * BT + tl.arange(0, BT)
        inside = (row < ROWS)[:, None] & (channel < C)[None, :]
        dz = _slope(x, w, bias, place, dy, row, channel, ROWS, T, C, W, SILU)
        db += tl.sum(dz, 0)
        dxs = dz * _tap(w, W - 1, channel, C)
        for back in tl.static_range(1, W):
            later = row + back
            reached = _slope(x, w, bias, place, dy, later, channel, ROWS, T, C, W, SILU)
            dxs += tl.where((_place(place, later, ROWS, T) >= back)[:, None], reached, 0) * _tap(w, W - 1 - back, channel, C)
        tl.store(dx + row.to(tl.int64)[:, None] * C + channel[None, :], dxs.to(dx.dtype.element_ty), mask=inside)
        for j in tl.static_range(W):
            part = tl.sum(dz * _input(x, place, row, channel, W - 1 - j, ROWS, T, C), 0)
            dws += tl.where((tap == j)[:, None], part[None, :], 0)
    at = (group * W + tap)[:, None] * C + channel[None, :]
    tl.store(dw + at, dws, mask=(tap < W)[:, None] & (channel < C)[None, :])
    tl.store(dbias + group * C + channel, db, mask=channel < C)
