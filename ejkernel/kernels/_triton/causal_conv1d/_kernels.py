"""The short causal convolution: z_t = sum_k w_{W-1-k} x_{t-k} + bias, y = z or silu(z), forward and backward.

A program has G runs of tokens of one row of the batch, of BC channels. Each run goes through its tokens one by one and keeps
the last W - 1 inputs in registers, so that it reads an input once. AHEAD tokens are read at a time. `place[t]` is a token's
place in its sequence: the input k tokens earlier counts where place[t] >= k. It is -1 after the last sequence, where y is 0.
Without `place` every row of the batch is one sequence.
"""

# mypy: disable-error-code="assignment"
# Tuples grow by one tensor at a time.
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _begin(program, T, C: tl.constexpr, RUN: tl.constexpr, G: tl.constexpr, BC: tl.constexpr):
    """(row tile, first token [G, 1] of each run, channel [1, BC], where they lie [G, BC])."""
    channel_tiles: tl.constexpr = (C + BC - 1) // BC
    tile = program // channel_tiles
    tiles = tl.cdiv(T, G * RUN)  # of one row of the batch
    token = (tile % tiles * G + tl.arange(0, G))[:, None] * RUN
    channel = (program % channel_tiles * BC + tl.arange(0, BC))[None, :]
    return tile, token, channel, ((tile // tiles).to(tl.int64) * T + token) * C + channel


@triton.jit
def _read(x, at, token, channel, T, C: tl.constexpr, count: tl.constexpr):
    """`count` tokens from each run's `token` on, as many times [G, BC]; 0 where there is none."""
    rows = ()
    for i in tl.static_range(count):
        rows += (tl.load(x + at + i * C, mask=(token + i >= 0) & (token + i < T) & (channel < C), other=0),)
    return rows


@triton.jit
def _read_places(place, token, T, count: tl.constexpr):
    """The places of as many tokens, each [G, 1]; None of them without `place`."""
    places = ()
    if place is not None:
        for i in tl.static_range(count):
            places += (tl.load(place + token + i, mask=token + i < T, other=-1),)
    return places


@triton.jit
def _taps(weight, channel, C: tl.constexpr, W: tl.constexpr):
    """W times [1, BC] in float32, the current token's first."""
    taps = ()
    for k in tl.static_range(W):
        taps += (tl.load(weight + (W - 1 - k) * C + channel, mask=channel < C, other=0).to(tl.float32),)
    return taps


@triton.jit
def _bias(bias, channel, C: tl.constexpr, BC: tl.constexpr):
    """[1, BC] in float32."""
    if bias is None:
        return tl.zeros([1, BC], tl.float32)
    else:
        return tl.load(bias + channel, mask=channel < C, other=0).to(tl.float32)


@triton.jit
def _past(x, at, token, channel, T, C: tl.constexpr, W: tl.constexpr):
    """The W - 1 inputs before each run, the latest first, in float32."""
    rows = _read(x, at - (W - 1) * C, token - (W - 1), channel, T, C, W - 1)
    past = ()
    for k in tl.static_range(W - 1):
        past += (rows[W - 2 - k].to(tl.float32),)
    return past


@triton.jit
def _newest(now, past, W: tl.constexpr):
    """The W - 1 inputs before the next token."""
    known = (now.to(tl.float32),)
    known += past
    return known[: W - 1]


@triton.jit
def _reaching(value, places, i: tl.constexpr, k: tl.constexpr):
    """`value`, which goes from a token to the one k later (or back), where the later one, i, has such a token before it."""
    if len(places) == 0:
        return value
    else:
        return tl.where(places[i] >= k, value, 0.0)


@triton.jit
def _sum(now, past, taps, bias, places, i: tl.constexpr, W: tl.constexpr):
    """(z [G, BC], the W inputs that it is made of, the current token's first)."""
    now = _reaching(now.to(tl.float32), places, i, 0)  # [G, BC]
    seen, z = (now,), now * taps[0] + bias
    for k in tl.static_range(1, W):
        earlier = _reaching(past[k - 1], places, i, k)  # [G, BC]
        seen += (earlier,)
        z += earlier * taps[k]
    return z, seen


@triton.jit
def convolve(
    x, weight, bias, place, T, y,
    C: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr,
    RUN: tl.constexpr, AHEAD: tl.constexpr, G: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Programs: channel tiles * tiles of G * RUN tokens of every row of the batch."""
    program = tl.program_id(0)
    _tile, token, channel, at = _begin(program, T, C, RUN, G, BC)
    taps, b = _taps(weight, channel, C, W), _bias(bias, channel, C, BC)
    past = _past(x, at, token, channel, T, C, W)
    for t in range(0, RUN, AHEAD):
        rows = _read(x, at + t * C, token + t, channel, T, C, AHEAD)
        places = _read_places(place, token + t, T, AHEAD)
        for i in tl.static_range(AHEAD):
            z, _seen = _sum(rows[i], past, taps, b, places, i, W)
            past = _newest(rows[i], past, W)
            if SILU:
                z = z / (1 + tl.exp(-z))
            z = _reaching(z, places, i, 0)
            mask = (token + t + i < T) & (channel < C)
            tl.store(y + at + (t + i) * C, z.to(y.dtype.element_ty), mask=mask)


@triton.jit
def convolve_back(
    x, weight, bias, place, T, dy, dx, dweight, dbias,
    C: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr,
    RUN: tl.constexpr, AHEAD: tl.constexpr, G: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Programs: channel tiles * tiles of G * RUN tokens of every row of the batch, whose own sums dweight [B, tiles, W, C] and
    dbias [B, tiles, C] are.

    dx_t = sum_k w_{W-1-k} dz_{t+k}, so a run goes on for W - 1 tokens after its own. RUN + W - 1 is a multiple of AHEAD.
    """
    program = tl.program_id(0)
    tile, token, channel, at = _begin(program, T, C, RUN, G, BC)
    taps, b = _taps(weight, channel, C, W), _bias(bias, channel, C, BC)
    past = _past(x, at, token, channel, T, C, W)
    nothing = tl.zeros([G, BC], tl.float32)
    pending = (nothing,) * (W - 1)  # dx of the last W - 1 tokens, the latest first
    dws, db = (nothing,) * W, nothing
    for t in range(0, RUN + W - 1, AHEAD):
        rows = _read(x, at + t * C, token + t, channel, T, C, AHEAD)
        slopes = _read(dy, at + t * C, token + t, channel, T, C, AHEAD)
        places = _read_places(place, token + t, T, AHEAD)
        for i in tl.static_range(AHEAD):
            z, seen = _sum(rows[i], past, taps, b, places, i, W)
            past = _newest(rows[i], past, W)
            dz = slopes[i].to(tl.float32)
            if SILU:
                s = 1 / (1 + tl.exp(-z))
                dz *= s * (1 + z * (1 - s))
            dz = _reaching(dz, places, i, 0)
            found = (dz * taps[0],)
            for k in tl.static_range(1, W):
                found += (pending[k - 1] + _reaching(dz, places, i, k) * taps[k],)
            pending = found[: W - 1]
            own = tl.where(t + i < RUN, dz, 0.0)
            db += own
            sums = ()
            for k in tl.static_range(W):
                sums += (dws[k] + own * seen[k],)
            dws = sums
            done = token + (t + i - (W - 1))  # [G, 1]
            mask = (done >= token) & (done < T) & (channel < C)
            tl.store(dx + at + (t + i - (W - 1)) * C, found[W - 1].to(dx.dtype.element_ty), mask=mask)
    for k in tl.static_range(W):
        to = (tile.to(tl.int64) * W + W - 1 - k) * C + channel
        tl.store(dweight + to, tl.sum(dws[k], 0)[None, :], mask=channel < C)
    if dbias is not None:
        tl.store(dbias + tile.to(tl.int64) * C + channel, tl.sum(db, 0)[None, :], mask=channel < C)
