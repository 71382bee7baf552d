"""`scan_key_value` for Hopper, by warpgroups that do different things at one time; bfloat16, 128 key and 128 value channels.

With c the sum of the values' log decays from the middle of a chunk, `half` = exp of half of all, y = v exp(-c), D the chunk's
decay of key channels, and qd, kd and A as `weak_rows` left them:

    M = half S          o = exp(c) (A y + qd M)          S' = half (D M + kd^T y)

A program scans all value channels of a segment of one head. Its warpgroups hand chunks on through rings of slots in shared
memory:

    copy_chunks     fills slots: of values with v, gv and D; of keys with qd, kd; and the one of scores with A
    scan_values     one warpgroup for each 64 value channels, with their part of the state in registers

All is transposed, [value channels, rows or key channels], as in `wide_scan_warpgroups`: y and the state are left operands,
which the tensor cores take from registers. Every operand is high and low part of bfloat16, each product three. The state is
kept in two parts of 64 key channels, of which one at a time is an operand; meanwhile the other warpgroup's products run.

Where values are not weakly gated y is decayed to the chunk's end at once, by sums over the rows after each, and the state by
all of the chunk before. o is of no use there. Log decays are clamped first: -inf times 0 would be NaN.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from ejkernel.kernels._triton.linear.kernels.segments import chunk_in_turn, ends_sequence, rows_of_segment, scanned_segment
from ejkernel.kernels._triton.linear.kernels.tiles import clamped, program_at
from ejkernel.kernels._triton.linear.kernels.warpgroups import (
    LOG2_E,
    TILE,
    WARPS,
    barriers_of,
    copy_numbers,
    copy_rows,
    copy_tile,
    exp2,
    next_slot,
    split_bfloat16,
    store_turned,
    tiles,
    warpgroup_barrier,
)

CHANNELS = gl.constexpr(128)
SLOTS = gl.constexpr(2)


@gluon.jit
def copy_chunks(
    qd, kd, chunk_decay, A, A_low, v, gv, rings, barriers, segment, token0, rows_left, head,
    H: gl.constexpr, HV: gl.constexpr, HG: gl.constexpr, C: gl.constexpr, SIGN: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    q_ring, k_ring, v_ring, g_ring, decay_ring, scores, _sums = rings
    values_full, values_empty, keys_full, keys_empty, scores_full, scores_empty = barriers
    _g, first, count, _seq, _place, _total = segment
    slot = 0
    phase = 1  # the first wait for a slot finds it empty
    turn = 1
    for n in range(count):
        s, token, rows = chunk_in_turn(first, count, token0, rows_left, n, False, C, SIGN)
        index = s.to(gl.int64) * H + head
        mbarrier.wait(values_empty.index(slot), phase)
        for i in gl.static_range(2):
            part = slot * 2 + i
            copy_rows(gv, g_ring.index(part), token, rows, head // (H // HG), i * TILE, HG, CHANNELS, C, TILE, SIGN, EVEN)
            copy_rows(v, v_ring.index(part), token, rows, head // (H // HV), i * TILE, HV, CHANNELS, C, TILE, SIGN, EVEN)
        copy_numbers(chunk_decay, decay_ring.index(slot), index, CHANNELS)
        async_copy.mbarrier_arrive(values_full.index(slot), increment_count=False)
        mbarrier.wait(keys_empty.index(slot), phase)
        for p in gl.static_range(2):
            row = (index * 2 + p) * C
            for i in gl.static_range(2):
                part = (slot * 2 + i) * 2 + p
                copy_tile(qd, q_ring.index(part), row, i * TILE, CHANNELS, C, TILE)
                copy_tile(kd, k_ring.index(part), row, i * TILE, CHANNELS, C, TILE)
        async_copy.mbarrier_arrive(keys_full.index(slot), increment_count=False)
        mbarrier.wait(scores_empty.index(0), turn)  # last, since it may still be taken by the chunk before
        copy_tile(A, scores.index(0), index * C, 0, C, C, C)
        copy_tile(A_low, scores.index(1), index * C, 0, C, C, C)
        async_copy.mbarrier_arrive(scores_full.index(0), increment_count=False)
        slot, phase = next_slot(slot, phase, SLOTS)
        turn ^= 1


@gluon.jit
def _tile_of_state(x, index, KEY_PART: gl.constexpr, col, layout: gl.constexpr):
    """[TILE, TILE]: where value channels from `col` on of a part of state `index` of x [states, keys, values] lie."""
    i = col + gl.arange(0, TILE, gl.SliceLayout(1, layout))[:, None]
    j = KEY_PART * TILE + gl.arange(0, TILE, gl.SliceLayout(0, layout))[None, :]
    return x + index * (CHANNELS * CHANNELS) + (i + j * CHANNELS)


@gluon.jit
def _state_at_start(
    begin, ends, end_decay, end_decay_v, segment, head, KEY_PART: gl.constexpr, col, H: gl.constexpr, layout: gl.constexpr
):
    """[TILE, TILE]: as `segments.state_at_start`, of decays per key and value channel."""
    g, _first, _count, seq, place, _total = segment
    S = gl.zeros([TILE, TILE], gl.float32, layout)
    if begin is not None:
        S += gl.load(_tile_of_state(begin, seq.to(gl.int64) * H + head, KEY_PART, col, layout)).to(gl.float32)
    if ends is not None:
        i = col + gl.arange(0, TILE, gl.SliceLayout(1, layout))
        j = KEY_PART * TILE + gl.arange(0, TILE, gl.SliceLayout(0, layout))
        for n in range(place):
            other = (g - place + n).to(gl.int64) * H + head
            S = S * gl.load(end_decay_v + other * CHANNELS + i)[:, None]
            S = S * gl.load(end_decay + other * CHANNELS + j)[None, :]
            S += gl.load(_tile_of_state(ends, other, KEY_PART, col, layout))
    return S


@gluon.jit
def _store_part(states, S, staging, index, KEY_PART: gl.constexpr, col):
    """Writes S [TILE, TILE] to matrices 2 index and 2 index + 1 of states [states, 2, keys, values]: high and low part."""
    high, low = split_bfloat16(S)
    row = index * 2 * CHANNELS + KEY_PART * TILE
    store_turned(states, high, staging, row, TILE, 0, col, 1, CHANNELS, TILE, 1, True)
    warpgroup_barrier()
    store_turned(states, low, staging, row + CHANNELS, TILE, 0, col, 1, CHANNELS, TILE, 1, True)
    warpgroup_barrier()


@gluon.jit
def _split_left(x):
    """Left operands: high and low part of x."""
    left: gl.constexpr = gl.DotOperandLayout(0, x.type.layout, 2)
    high, low = split_bfloat16(x)
    return gl.convert_layout(high, left), gl.convert_layout(low, left)


@gluon.jit
def _add_product(high, low, ring, index, acc, TURNED: gl.constexpr, FIRST: gl.constexpr):
    """Begins acc + (high + low)(b + b_low), less the product of the low parts. TURNED: b lies transposed. FIRST: acc is 0."""
    b = ring.index(index)
    b_low = ring.index(index + 1)
    if TURNED:
        b = b.permute((1, 0))
        b_low = b_low.permute((1, 0))
    acc = warpgroup_mma(high, b, acc, use_acc=not FIRST, is_async=True)
    acc = warpgroup_mma(low, b, acc, is_async=True)
    return warpgroup_mma(high, b_low, acc, is_async=True)


@gluon.jit
def scan_values(
    begin, ends, end_decay, end_decay_v, weak, o, final, states, rings, barriers, segment, token0, rows_left, head,
    PART: gl.constexpr, H: gl.constexpr, C: gl.constexpr, SIGN: gl.constexpr, EVEN: gl.constexpr, KEEP: gl.constexpr,
):  # fmt: skip
    """The value channels from PART * TILE on."""
    q_ring, k_ring, v_ring, g_ring, decay_ring, scores, sums = rings
    values_full, values_empty, keys_full, keys_empty, scores_full, scores_empty = barriers
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, C, 16])  # C and TILE are the same
    by_key: gl.constexpr = gl.SliceLayout(0, layout)
    row = gl.arange(0, C, gl.SliceLayout(0, layout))[None, :]
    zero = gl.zeros([TILE, C], gl.float32, layout)
    _g, first, count, seq, _place, _total = segment
    col = PART * TILE
    S0 = _state_at_start(begin, ends, end_decay, end_decay_v, segment, head, 0, col, H, layout)
    S1 = _state_at_start(begin, ends, end_decay, end_decay_v, segment, head, 1, col, H, layout)
    slot = 0
    phase = 0
    turn = 0
    next_weak = 1
    if count > 0:
        next_weak = gl.load(weak + first.to(gl.int64) * H + head)
    for n in range(count):
        s, token, rows = chunk_in_turn(first, count, token0, rows_left, n, False, C, SIGN)
        index = s.to(gl.int64) * H + head
        is_weak = next_weak
        next_weak = gl.load(weak + (first + gl.minimum(n + 1, count - 1)).to(gl.int64) * H + head)
        v = v_ring.index(slot * 2 + PART)
        g = g_ring.index(slot * 2 + PART)
        mbarrier.wait(values_full.index(slot), phase)
        upper = gl.zeros([TILE], gl.float32, gl.SliceLayout(1, layout))
        if is_weak == 0:
            logs = clamped(g.permute((1, 0)).load(layout).to(gl.float32))  # [TILE, C]
            upper = exp2(gl.sum(logs, 1) * LOG2_E)
            g.permute((1, 0)).store(logs.to(gl.bfloat16))
            fence_async_shared()
            warpgroup_barrier()
        c = warpgroup_mma(g.permute((1, 0)), sums.index(1 - is_weak), zero, use_acc=False, is_async=True)  # [TILE, C]
        c = warpgroup_mma_wait(0, deps=[c])
        c *= LOG2_E
        lower = exp2(gl.sum(gl.where(row == C - 1, c, 0.0), 1))  # [TILE]; 1 where values are not weakly gated
        upper = gl.where(is_weak != 0, lower, upper)
        values = v.permute((1, 0)).load(layout)
        warpgroup_barrier()  # now v is read, and its tile is for what goes out
        if KEEP:
            _store_part(states, S0, v, index, 0, col)
            _store_part(states, S1, v, index, 1, col)
        else:
            if is_weak == 0:  # `gated_axis` will need it
                _store_part(states, S0, v, index, 0, col)
                _store_part(states, S1, v, index, 1, col)
        y, y_low = _split_left(values.to(gl.float32) * exp2(-c))
        keys = slot * 4
        decays = decay_ring.index(slot)
        S0 *= upper[:, None]
        high, low = _split_left(S0)
        S0 *= decays.slice(0, TILE).load(by_key)[None, :]
        mbarrier.wait(keys_full.index(slot), phase)
        mbarrier.wait(scores_full.index(0), turn)
        bo = _add_product(y, y_low, scores, 0, zero, True, True)  # [TILE, C]
        bo = _add_product(high, low, q_ring, keys, bo, True, False)
        bo, y, y_low, high, low = warpgroup_mma_wait(0, deps=[bo, y, y_low, high, low])
        S0 = _add_product(y, y_low, k_ring, keys, S0, False, False)  # [TILE, TILE]
        S0, y, y_low = warpgroup_mma_wait(0, deps=[S0, y, y_low])
        warpgroup_barrier()
        mbarrier.arrive(scores_empty.index(0), count=1)
        S0 *= lower[:, None]
        S1 *= upper[:, None]
        high, low = _split_left(S1)
        S1 *= decays.slice(TILE, TILE).load(by_key)[None, :]
        bo = _add_product(high, low, q_ring, keys + 2, bo, True, False)
        S1 = _add_product(y, y_low, k_ring, keys + 2, S1, False, False)
        bo, high, low = warpgroup_mma_wait(3, deps=[bo, high, low])
        # Made again: meanwhile its registers are wanted for the operands.
        c = warpgroup_mma(g.permute((1, 0)), sums.index(1 - is_weak), zero, use_acc=False, is_async=True)
        S1, c, y, y_low = warpgroup_mma_wait(0, deps=[S1, c, y, y_low])
        S1 *= lower[:, None]
        store_turned(o, bo * exp2(c * LOG2_E), v, token, rows, head, col, H, CHANNELS, C, SIGN, EVEN)
        warpgroup_barrier()
        mbarrier.arrive(values_empty.index(slot), count=1)
        mbarrier.arrive(keys_empty.index(slot), count=1)
        slot, phase = next_slot(slot, phase, SLOTS)
        turn ^= 1
    if ends_sequence(segment, False):
        index = seq.to(gl.int64) * H + head
        gl.store(_tile_of_state(final, index, 0, col, layout), S0)
        gl.store(_tile_of_state(final, index, 1, col, layout), S1)


@gluon.jit
def _sums(C: gl.constexpr):
    """[2, C, C]: half of what is before and at a row less half of what is after; less all that is after."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    s = gl.arange(0, C, gl.SliceLayout(1, layout))[:, None]
    t = gl.arange(0, C, gl.SliceLayout(0, layout))[None, :]
    found = tiles(2)
    found.index(0).store(gl.where(s <= t, 0.5, -0.5).to(gl.bfloat16))
    found.index(1).store(gl.where(s <= t, 0.0, -1.0).to(gl.bfloat16))
    fence_async_shared()
    return found


@gluon.jit
def key_value_scan_by_warpgroups(
    qd, kd, chunk_decay, A, A_low, v, gv, weak, begin, ends, end_decay, end_decay_v, chunks, segments, T, NT, NS, SC,
    o, final, states,
    H: gl.constexpr, HV: gl.constexpr, HG: gl.constexpr, C: gl.constexpr, SIGN: gl.constexpr, EVEN: gl.constexpr,
    KEEP: gl.constexpr, COPY_REGISTERS: gl.constexpr, VALUE_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Programs: segments * heads. Arguments as of `scan_key_value`; gv in bfloat16.

    REGISTERS: of a thread of each kind of warpgroup; the first of `scan_values` has the rest.
    """
    _tile, head, unit = program_at(1, H)
    segment, idle = scanned_segment(segments, unit, NT, NS, SC, False, False)
    if idle:
        return
    _g, first, count, _seq, _place, _total = segment
    token0, rows_left = rows_of_segment(chunks, first, count, T, NT, C, SIGN)
    decay_ring = gl.allocate_shared_memory(gl.float32, [SLOTS, CHANNELS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    rings = (tiles(4 * SLOTS), tiles(4 * SLOTS), tiles(2 * SLOTS), tiles(2 * SLOTS), decay_ring, tiles(2), _sums(C))
    barriers = (
        barriers_of(SLOTS, 32 * WARPS), barriers_of(SLOTS, 2), barriers_of(SLOTS, 32 * WARPS), barriers_of(SLOTS, 2),
        barriers_of(1, 32 * WARPS), barriers_of(1, 2),
    )  # fmt: skip
    gl.warp_specialize(
        [
            (scan_values, (
                begin, ends, end_decay, end_decay_v, weak, o, final, states, rings, barriers, segment, token0, rows_left, head,
                0, H, C, SIGN, EVEN, KEEP,
            )),
            (scan_values, (
                begin, ends, end_decay, end_decay_v, weak, o, final, states, rings, barriers, segment, token0, rows_left, head,
                1, H, C, SIGN, EVEN, KEEP,
            )),
            (copy_chunks, (
                qd, kd, chunk_decay, A, A_low, v, gv, rings, barriers, segment, token0, rows_left, head, H, HV, HG, C, SIGN,
                EVEN,
            )),
        ],
        [WARPS, WARPS],
        [VALUE_REGISTERS, COPY_REGISTERS],
    )  # fmt: skip
