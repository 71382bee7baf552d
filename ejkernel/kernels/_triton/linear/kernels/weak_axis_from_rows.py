"""`weak_axis` for Hopper where the other axis has a gate, too: the own channels' gradients in weakly gated chunks; bfloat16,
whole tiles.

An axis is as in `general_axis`: x and y are q and k, or do and v. Of the other one its gated rows x2 and y2 and its scores A2
are there, as the states are, in high and low part of bfloat16. With c, half, S and dS as in `weak_axis_warpgroups`, and D2 the
chunk's decay of the other channels, fx = scale x exp(c), fy = y exp(-c):

    ax = half (S x2^T) + A2 fy         dx = scale exp(c) ax
    ay = half (dS y2^T) + A2^T fx      dy = exp(-c) ay
    dg = sum over rows >= t of (x dx - y dy)  +  half^2 sum(S D2 dS)  +  half sum(fy (dS y2^T))

each product as three of bfloat16 parts. All is transposed, [own channels, rows]. A program takes every so manyth chunk of all
heads, and in it one tile of 64 own channels after the other. Its warpgroups:

    copy_tiles       fills slots: of own tiles with g, y, x; of states' tiles of 64 own and 64 other channels with S, dS and the
                     other channels' x2, y2; of scores with A2
    sum_passed       sum(S D2 dS), which no product makes
    make_gradients   two warpgroups: one for each 64 own channels, or, of 64 own channels, for every other chunk

So the warpgroups of gradients have tiles in turn, and each has its own slot of own tiles and of what is passed. Of states'
tiles there are two slots, whose barriers `full` are each warpgroup's own as well: a warpgroup must see every phase of a barrier
that it waits at. A round is one tile of each.
"""

# ruff: noqa: RUF005  (Triton knows sums of tuples, but not iterable unpacking)
from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ejkernel.kernels._triton.linear.kernels.warpgroups import (
    LOG2_E,
    TILE,
    WARPS,
    barriers_of,
    copy_rows,
    copy_tile,
    exp2,
    tiles,
    warpgroup_barrier,
)
from ejkernel.kernels._triton.linear.kernels.weak_axis_warpgroups import (
    chunk_of,
    following,
    gradients_of_tile,
    matrices,
)


@gluon.jit
def copy_tiles(
    x, y, g, x2, y2, A2, A2_low, starts, ends, weak, chunks, rings, barriers, start, step, COUNT, T, NT,
    H: gl.constexpr, HX: gl.constexpr, HY: gl.constexpr, HG: gl.constexpr, D: gl.constexpr, D2: gl.constexpr,
    C: gl.constexpr, SIGN: gl.constexpr, EVEN: gl.constexpr, TURNED: gl.constexpr,
):  # fmt: skip
    TILES: gl.constexpr = D // TILE
    TILES2: gl.constexpr = D2 // TILE
    own_rings, states_rings, score_rings, _passed, _sums = rings
    x_ring, y_ring, g_ring = own_rings
    x2_ring, y2_ring, S_ring, dS_ring = states_rings
    A_ring, A_low_ring = score_rings
    own_full, own_empty, states_full, states_empty, scores_full, scores_empty, _ready, _taken = barriers
    turn = 0  # whose chunk it is, where the warpgroups have one each
    phase = 1  # the first wait for a slot finds it empty
    token, rows, wanted = chunk_of(start, COUNT, weak, chunks, T, NT, H, C, SIGN)
    for i in range(start, COUNT, step):
        next_token, next_rows, next_wanted = chunk_of(i + step, COUNT, weak, chunks, T, NT, H, C, SIGN)
        if wanted != 0:
            head = i % H
            index = gl.cast(i, gl.int64)
            # A loop that is not unrolled, or the compiler would keep the addresses of a tile for the next one, and spill them.
            for tile in range(TILES * TILES2 + (wanted >> 1)):
                n = tile // TILES2
                m = tile % TILES2
                part = turn + n
                if m == 0:
                    mbarrier.wait(own_empty.index(part), phase)
                    copy_rows(g, g_ring.index(part), token, rows, head // (H // HG), n * TILE, HG, D, C, TILE, SIGN, EVEN)
                    copy_rows(y, y_ring.index(part), token, rows, head // (H // HY), n * TILE, HY, D, C, TILE, SIGN, EVEN)
                    copy_rows(x, x_ring.index(part), token, rows, head // (H // HX), n * TILE, HX, D, C, TILE, SIGN, EVEN)
                    async_copy.mbarrier_arrive(own_full.index(part), increment_count=False)
                if TILES2 == 2:  # of two slots for the tiles of one warpgroup each is used twice in a round
                    slot = m
                    mbarrier.wait(states_empty.index(slot), part ^ 1)
                else:
                    slot = part
                    mbarrier.wait(states_empty.index(slot), phase)
                for p in gl.static_range(2):
                    of_rows = (index * 2 + p) * C
                    copy_tile(x2, x2_ring.index(slot * 2 + p), of_rows, m * TILE, D2, C, TILE)
                    copy_tile(y2, y2_ring.index(slot * 2 + p), of_rows, m * TILE, D2, C, TILE)
                    if TURNED:
                        row = (index * 2 + p) * D2 + m * TILE
                        copy_tile(starts, S_ring.index(slot * 2 + p), row, n * TILE, D, TILE, TILE)
                        copy_tile(ends, dS_ring.index(slot * 2 + p), row, n * TILE, D, TILE, TILE)
                    else:
                        row = (index * 2 + p) * D + n * TILE
                        copy_tile(starts, S_ring.index(slot * 2 + p), row, m * TILE, D2, TILE, TILE)
                        copy_tile(ends, dS_ring.index(slot * 2 + p), row, m * TILE, D2, TILE, TILE)
                async_copy.mbarrier_arrive(states_full.index(slot * 2 + part), increment_count=False)
                if tile == TILES2 - 1:
                    mbarrier.wait(scores_empty.index(turn), phase)
                    copy_tile(A2, A_ring.index(turn), index * C, 0, C, C, C)
                    copy_tile(A2_low, A_low_ring.index(turn), index * C, 0, C, C, C)
                    async_copy.mbarrier_arrive(scores_full.index(turn), increment_count=False)
            turn, phase = following(turn, phase, wanted, 3 - TILES)
        token, rows, wanted = next_token, next_rows, next_wanted


@gluon.jit
def _whole(ring, slot, row: gl.constexpr, layout: gl.constexpr):
    """16 rows of a tile, both parts added up."""
    high = ring.index(slot * 2).slice(row, 16, 0).load(layout)
    return high.to(gl.float32) + ring.index(slot * 2 + 1).slice(row, 16, 0).load(layout).to(gl.float32)


@gluon.jit
def sum_passed(
    chunk_decay2, weak, chunks, rings, barriers, start, step, COUNT, T, NT,
    H: gl.constexpr, D: gl.constexpr, D2: gl.constexpr, C: gl.constexpr, SIGN: gl.constexpr, TURNED: gl.constexpr,
):  # fmt: skip
    TILES: gl.constexpr = D // TILE
    TILES2: gl.constexpr = D2 // TILE
    _own, states_rings, _scores, passed_ring, _sums = rings
    _x2, _y2, S_ring, dS_ring = states_rings
    _own_full, _own_empty, states_full, states_empty, _scores_full, _scores_empty, ready, taken = barriers
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    in_row = gl.arange(0, TILE, gl.SliceLayout(0, layout))
    in_column = gl.arange(0, 16, gl.SliceLayout(1, layout))
    turn = 0
    phase = 0
    _token, _rows, wanted = chunk_of(start, COUNT, weak, chunks, T, NT, H, C, SIGN)
    for i in range(start, COUNT, step):
        _token, _rows, next_wanted = chunk_of(i + step, COUNT, weak, chunks, T, NT, H, C, SIGN)
        if wanted != 0:
            decays = chunk_decay2 + gl.cast(i, gl.int64) * D2
            for n in range(TILES + (wanted >> 1)):
                part = turn + n
                mbarrier.wait(taken.index(part), phase ^ 1)
                products = gl.zeros([16, TILE], gl.float32, layout)
                for m in gl.static_range(TILES2):
                    slot = (wanted >> 1) + m if TILES2 == 2 else part
                    decay = ()  # of the other channels in each 16 rows; before the wait, or the slot would be held meanwhile
                    for row in gl.static_range(0, TILE, 16):
                        if TURNED:
                            found = gl.load(decays + (m * TILE + row) + in_column)[:, None]
                        else:
                            found = gl.load(decays + m * TILE + in_row)[None, :]
                        decay = decay + (found,)  # type: ignore[assignment]
                    mbarrier.wait(states_full.index(slot * 2 + part), phase)
                    for row in gl.static_range(0, TILE, 16):
                        dS = _whole(dS_ring, slot, row, layout) * decay[row // 16]
                        if TURNED:
                            products += _whole(S_ring, slot, row, layout) * dS
                        else:
                            passed = gl.sum(_whole(S_ring, slot, row, layout) * dS, 1)  # [16]
                            place = passed_ring.index(part).slice(row, 16)
                            if m > 0:
                                passed += place.load(gl.SliceLayout(1, layout))
                            place.store(passed)
                    warpgroup_barrier()
                    mbarrier.arrive(states_empty.index(slot), count=1)
                if TURNED:
                    passed_ring.index(part).store(gl.sum(products, 0))
                    warpgroup_barrier()
                mbarrier.arrive(ready.index(part), count=1)
            turn, phase = following(turn, phase, wanted, 3 - TILES)
        wanted = next_wanted


@gluon.jit
def _add_product(a_ring, b_ring, slot, acc, TURNED: gl.constexpr, FIRST: gl.constexpr):
    """Begins acc + a b^T of tiles in high and low part; TURNED: a lies transposed. FIRST: acc is 0."""
    a = a_ring.index(slot * 2)
    a_low = a_ring.index(slot * 2 + 1)
    if TURNED:
        a = a.permute((1, 0))
        a_low = a_low.permute((1, 0))
    b = b_ring.index(slot * 2).permute((1, 0))
    acc = warpgroup_mma(a, b, acc, use_acc=not FIRST, is_async=True)
    acc = warpgroup_mma(a, b_ring.index(slot * 2 + 1).permute((1, 0)), acc, is_async=True)
    return warpgroup_mma(a_low, b, acc, is_async=True)


@gluon.jit
def make_gradients(
    dx, dy, dg, weak, chunks, rings, barriers, start, step, scale, COUNT, T, NT,
    PART: gl.constexpr, H: gl.constexpr, D: gl.constexpr, D2: gl.constexpr, C: gl.constexpr, SIGN: gl.constexpr,
    EVEN: gl.constexpr, TURNED: gl.constexpr,
):  # fmt: skip
    """The own channels from PART * TILE on; of one tile, all of them in every other chunk from PART on."""
    TILES: gl.constexpr = D // TILE
    TILES2: gl.constexpr = D2 // TILE
    own_rings, states_rings, score_rings, passed_ring, sums = rings
    x_ring, y_ring, g_ring = own_rings
    x2_ring, y2_ring, S_ring, dS_ring = states_rings
    A_ring, A_low_ring = score_rings
    from_middle, onwards = sums
    own_full, own_empty, states_full, states_empty, scores_full, scores_empty, ready, taken = barriers
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, C, 16])
    row = gl.arange(0, C, gl.SliceLayout(0, layout))[None, :]
    zero = gl.zeros([TILE, C], gl.float32, layout)
    phase = 0
    one = 1.0 + scale * 0.0  # which the compiler does not know
    others = PART * (2 - TILES)  # chunks of the other warpgroup to come before the next one of this
    token, rows, wanted = chunk_of(start, COUNT, weak, chunks, T, NT, H, C, SIGN)
    for i in range(start, COUNT, step):
        next_token, next_rows, next_wanted = chunk_of(i + step, COUNT, weak, chunks, T, NT, H, C, SIGN)
        if wanted != 0:
            if others == 0:
                nothing = wanted >> 1  # which the compiler does not know either: see `following`
                own = nothing + PART
                place = nothing + PART * (2 - TILES)
                x = x_ring.index(own)
                y = y_ring.index(own)
                g = g_ring.index(own)
                mbarrier.wait(own_full.index(own), phase)
                c = warpgroup_mma(g.permute((1, 0)), from_middle, zero, use_acc=False, is_async=True)  # [TILE, C]
                ax = zero
                ay = zero
                for m in gl.static_range(TILES2):
                    slot = nothing + (m if TILES2 == 2 else PART)
                    mbarrier.wait(states_full.index(slot * 2 + PART), phase)
                    ax = _add_product(S_ring, x2_ring, slot, ax, TURNED, m == 0)
                    ay = _add_product(dS_ring, y2_ring, slot, ay, TURNED, m == 0)
                    if m == 0:
                        c = warpgroup_mma_wait(6, deps=[c])
                        c *= LOG2_E
                        half = exp2(gl.sum(gl.where(row == C - 1, c, 0.0), 1))  # [TILE]
                        fy = y.permute((1, 0)).load(layout).to(gl.float32) * exp2(-c)  # [TILE, C]
                    ax, ay = warpgroup_mma_wait(0, deps=[ax, ay])
                    warpgroup_barrier()
                    mbarrier.arrive(states_empty.index(slot), count=1)
                ax *= half[:, None]
                ay *= half[:, None]
                mbarrier.wait(ready.index(own), phase)
                everything = passed_ring.index(own).load(gl.SliceLayout(1, layout)) * half * half + gl.sum(fy * ay, 1)
                warpgroup_barrier()
                mbarrier.arrive(taken.index(own), count=1)
                gradients_of_tile(
                    dx, dy, dg, x, y, g, A_ring.index(place), A_low_ring.index(place), scores_full.index(place), phase,
                    scores_empty.index(place), c, fy, ax, ay, everything, onwards, zero, scale, one, token, rows, i % H,
                    PART * (TILES - 1) * TILE, H, D, C, SIGN, EVEN, False,
                )  # fmt: skip
                warpgroup_barrier()
                mbarrier.arrive(own_empty.index(own), count=1)
                phase ^= 1
            if TILES == 1:
                others = 1 - others
        token, rows, wanted = next_token, next_rows, next_wanted


@gluon.jit
def weak_axis_from_rows_by_warpgroups(
    x, y, g, x2, y2, A2, A2_low, chunk_decay2, starts, ends, weak, chunks, scale, COUNT, T, NT,
    dx, dy, dg,
    H: gl.constexpr, HX: gl.constexpr, HY: gl.constexpr, HG: gl.constexpr, D: gl.constexpr, D2: gl.constexpr,
    C: gl.constexpr, SIGN: gl.constexpr, EVEN: gl.constexpr, TURNED: gl.constexpr, COPY_REGISTERS: gl.constexpr,
    PASSED_REGISTERS: gl.constexpr, GRADIENT_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Programs: as many as fill the device; each takes every so manyth of COUNT = chunks * heads.

    x2, y2 [chunks, H, 2, C, D2], A2, A2_low [chunks, H, C, C], chunk_decay2 [chunks, H, D2]: of the other axis. starts, ends
    [chunks, H, 2, D, D2], or, TURNED, [chunks, H, 2, D2, D]: state before and adjoint after each chunk. weak [chunks, H]: 0
    where nothing is to be done. dx (or None), dy, dg: gradients of x, y and g, per query head. D and D2 are 64 or 128.
    REGISTERS: of a thread of each kind of warpgroup; the first of `make_gradients` has the rest.
    """
    ROUND: gl.constexpr = 3 - D // TILE  # chunks
    start = gl.program_id(0)
    step = gl.num_programs(0)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    rings = (
        (tiles(2), tiles(2), tiles(2)), (tiles(4), tiles(4), tiles(4), tiles(4)), (tiles(ROUND), tiles(ROUND)),
        gl.allocate_shared_memory(gl.float32, [2, TILE], flat), matrices(C),
    )  # fmt: skip
    barriers = (
        barriers_of(2, 32 * WARPS), barriers_of(2, 1), barriers_of(4, 32 * WARPS), barriers_of(2, 2),
        barriers_of(ROUND, 32 * WARPS), barriers_of(ROUND, D // TILE), barriers_of(2, 1), barriers_of(2, 1),
    )  # fmt: skip
    gl.warp_specialize(
        [
            (make_gradients, (
                dx, dy, dg, weak, chunks, rings, barriers, start, step, scale, COUNT, T, NT, 0, H, D, D2, C, SIGN, EVEN, TURNED,
            )),
            (make_gradients, (
                dx, dy, dg, weak, chunks, rings, barriers, start, step, scale, COUNT, T, NT, 1, H, D, D2, C, SIGN, EVEN, TURNED,
            )),
            (sum_passed, (
                chunk_decay2, weak, chunks, rings, barriers, start, step, COUNT, T, NT, H, D, D2, C, SIGN, TURNED,
            )),
            (copy_tiles, (
                x, y, g, x2, y2, A2, A2_low, starts, ends, weak, chunks, rings, barriers, start, step, COUNT, T, NT, H, HX, HY,
                HG, D, D2, C, SIGN, EVEN, TURNED,
            )),
        ],
        [WARPS, WARPS, WARPS],
        [GRADIENT_REGISTERS, PASSED_REGISTERS, COPY_REGISTERS],
    )  # fmt: skip
