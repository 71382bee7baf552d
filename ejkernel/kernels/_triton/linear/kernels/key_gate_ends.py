"""What segments with one gate per key channel leave when they start from zero, on Hopper; bfloat16, chunks of 64, whole tiles.

In a chunk, with suf the decay after each row, and all of it the decay of the whole chunk:

    S' = all S + (k suf)^T v

Only products of decays, each the exponential of a sum that nothing is subtracted from: so any gate is right here, other than
in `key_gate_scan_by_warpgroups`. A program scans all value channels of a segment of one head. Its warpgroups hand chunks on
through a ring of slots in shared memory:

    copy_chunks     fills slots with k, v and log decays, the last row first: so what comes after a row is a running sum
    decay_rows      k suf in place of k, and the chunk's decay
    add_up          one warpgroup for each 64 value channels, with their part of the state in registers

Barriers of a slot: `full` when it is filled, `ready` when its rows have their decays, `empty` when all have read it.

ADJOINT goes back in time with q for k and do for v: then rows have the decays up to and with each of them, times the scale, and
come in their own order.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from ejkernel.kernels._triton.linear.kernels.segments import chunk_in_turn, rows_of_segment, scanned_segment
from ejkernel.kernels._triton.linear.kernels.tiles import clamped, program_at
from ejkernel.kernels._triton.linear.kernels.warpgroups import (
    TILE,
    WARPS,
    add,
    copy_async,
    copy_rows,
    exp_of_log,
    next_slot,
    warpgroup_barrier,
)


@gluon.jit
def _copy_gates_after(
    g, slot, token, rows, head, HG: gl.constexpr, K: gl.constexpr, C: gl.constexpr, SIGN: gl.constexpr
):  # fmt: skip
    """Starts to copy the gate of each row's successor to slot [C, K], where the last row comes first: it has none, so 0."""
    LANES: gl.constexpr = K // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    r = gl.arange(0, C, gl.SliceLayout(1, layout))[:, None]
    c = gl.arange(0, K, gl.SliceLayout(0, layout))[None, :]
    at = g + ((token + SIGN * rows) * HG + head) * K + (c - (SIGN * HG * K) * r)
    copy_async(slot, at, mask=(r > 0) & (r < rows) & (c < K))


@gluon.jit
def copy_chunks(
    k, v, g, rings, barriers, segment, token0, rows_left, head,
    H: gl.constexpr, HK: gl.constexpr, HV: gl.constexpr, HG: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    C: gl.constexpr, SIGN: gl.constexpr, EVEN: gl.constexpr, ADJOINT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    TV: gl.constexpr = V // TILE
    ORDER: gl.constexpr = SIGN if ADJOINT else -SIGN
    k_ring, v_ring, g_ring, _decays = rings
    full, _ready, empty = barriers
    _g, first, count, _seq, _place, _total = segment
    slot = 0
    phase = 1  # the first wait for a slot finds it empty
    for n in range(count):
        _s, token, rows = chunk_in_turn(first, count, token0, rows_left, n, ADJOINT, C, SIGN)
        mbarrier.wait(empty.index(slot), phase)
        if ADJOINT:
            copy_rows(g, g_ring.index(slot), token, rows, head // (H // HG), 0, HG, K, C, K, SIGN, EVEN)
        else:
            _copy_gates_after(g, g_ring.index(slot), token, rows, head // (H // HG), HG, K, C, SIGN)
            token += SIGN * (rows - 1)
        copy_rows(k, k_ring.index(slot), token, rows, head // (H // HK), 0, HK, K, C, K, ORDER, EVEN)
        for i in gl.static_range(TV):
            part = v_ring.index(slot * TV + i)
            copy_rows(v, part, token, rows, head // (H // HV), i * TILE, HV, V, C, TILE, ORDER, EVEN)
        async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
        slot, phase = next_slot(slot, phase, STAGES)


@gluon.jit
def _gate_of_row(g, token, head, c, H: gl.constexpr, HG: gl.constexpr, K: gl.constexpr):
    """[K]: the log decays of one token, as they are stored."""
    return gl.load(g + (token * HG + head // (H // HG)) * K + c)


@gluon.jit
def _log(gate):
    return clamped(gate.to(gl.float32))


@gluon.jit
def decay_rows(
    g, segment_decay, rings, barriers, segment, token0, rows_left, head, scale,
    H: gl.constexpr, HG: gl.constexpr, K: gl.constexpr, C: gl.constexpr, SIGN: gl.constexpr, ADJOINT: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    k_ring, _values, g_ring, decay_ring = rings
    full, ready, _empty = barriers
    place, first, count, _seq, _p, _total = segment
    HALF: gl.constexpr = C // 2
    LANES: gl.constexpr = K // 64
    # A thread has all rows of half a chunk for one or two channels.
    by_half: gl.constexpr = gl.BlockedLayout([1, HALF, LANES], [1, 1, 32], [2, 1, 2], [2, 1, 0])
    by_row: gl.constexpr = gl.BlockedLayout([HALF, LANES], [1, 32], [2, 2], [1, 0])
    of_channels: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, by_half))
    half = gl.arange(0, 2, gl.SliceLayout(1, gl.SliceLayout(2, by_half)))[:, None, None]
    c = gl.arange(0, K, of_channels)
    everything = gl.full([K], 1.0, gl.float32, of_channels)
    if not ADJOINT:
        first_gate = _gate_of_row(g, token0, head, c, H, HG, K)
    slot = 0
    phase = 0
    for n in range(count):
        mbarrier.wait(full.index(slot), phase)
        k = k_ring.index(slot)
        rows = k.load(by_row).to(gl.float32)  # [C, K]
        logs = _log(g_ring.index(slot).load(by_row))
        logs = gl.convert_layout(gl.reshape(logs, [2, HALF, K]), by_half)
        whole = gl.sum(logs, 1)[:, None, :]  # [2, 1, K]
        of_first = gl.sum(gl.where(half == 0, whole, 0.0), 0)[None, :, :]
        sums = gl.associative_scan(logs, 1, add) + gl.where(half == 0, 0.0, of_first)
        total = gl.sum(gl.sum(whole, 1), 0)
        if not ADJOINT:
            total += _log(first_gate)
            if n + 1 < count:  # read when it is needed, a turn later
                _s, token, _rows = chunk_in_turn(first, count, token0, rows_left, n + 1, ADJOINT, C, SIGN)
                first_gate = _gate_of_row(g, token, head, c, H, HG, K)
        decay = exp_of_log(gl.convert_layout(gl.reshape(sums, [C, K]), by_row))
        if ADJOINT:
            decay *= scale
        k.store((rows * decay).to(gl.bfloat16))
        whole_decay = exp_of_log(total)
        everything *= whole_decay
        decay_ring.index(slot).store(whole_decay)
        fence_async_shared()
        warpgroup_barrier()
        mbarrier.arrive(ready.index(slot), count=1)
        slot, phase = next_slot(slot, phase, STAGES)
    gl.store(segment_decay + (place.to(gl.int64) * H + head) * K + c, everything)


@gluon.jit
def add_up(
    final, rings, barriers, segment, head, PART: gl.constexpr, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """The value channels from PART * TILE on."""
    k_ring, v_ring, _logs, decay_ring = rings
    full, ready, empty = barriers
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TILE, 16])
    place, _first, count, _seq, _p, _total = segment
    S = gl.zeros([K, TILE], gl.float32, layout)
    slot = 0
    phase = 0
    for _n in range(count):
        mbarrier.wait(full.index(slot), phase)
        mbarrier.wait(ready.index(slot), phase)
        S *= decay_ring.index(slot).load(gl.SliceLayout(1, layout))[:, None]
        S = warpgroup_mma(k_ring.index(slot).permute((1, 0)), v_ring.index(slot * (V // TILE) + PART), S, is_async=True)
        S = warpgroup_mma_wait(0, deps=[S])  # [K, TILE]
        warpgroup_barrier()
        mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = next_slot(slot, phase, STAGES)
    i = gl.arange(0, K, gl.SliceLayout(1, layout))[:, None]
    j = PART * TILE + gl.arange(0, TILE, gl.SliceLayout(0, layout))[None, :]
    gl.store(final + (place.to(gl.int64) * H + head) * (K * V) + (i * V + j), S)


@gluon.jit
def key_gate_segment_ends(
    k, v, g, chunks, segments, scale, T, NT, NS, SC,
    final, segment_decay,
    H: gl.constexpr, HK: gl.constexpr, HV: gl.constexpr, HG: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    C: gl.constexpr, SIGN: gl.constexpr, EVEN: gl.constexpr, ADJOINT: gl.constexpr, STAGES: gl.constexpr,
    COPY_REGISTERS: gl.constexpr, ROW_REGISTERS: gl.constexpr, VALUE_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Programs: segments * heads. final [segments, H, K, V] and segment_decay [segments, H, K] of every segment from whose end
    another starts; K and V are 64 or 128, g [tokens, HG, K] in bfloat16.

    STAGES: slots of chunks. REGISTERS: of a thread of each kind of warpgroup; the first of `add_up` has the rest.
    """
    TV: gl.constexpr = V // TILE
    _tile, head, unit = program_at(1, H)
    segment, idle = scanned_segment(segments, unit, NT, NS, SC, ADJOINT, True)
    if idle:
        return
    _g, first, count, _seq, _place, _total = segment
    token0, rows_left = rows_of_segment(chunks, first, count, T, NT, C, SIGN)
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], gl.bfloat16)
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, TILE], gl.bfloat16)
    k_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], wide)
    v_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES * TV, C, TILE], narrow)
    g_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], wide)
    decay_ring = gl.allocate_shared_memory(gl.float32, [STAGES, K], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=32 * WARPS)
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(empty.index(i), count=TV)
    rings = (k_ring, v_ring, g_ring, decay_ring)
    barriers = (full, ready, empty)
    if TV == 2:
        gl.warp_specialize(
            [
                (add_up, (final, rings, barriers, segment, head, 0, H, K, V, STAGES)),
                (add_up, (final, rings, barriers, segment, head, 1, H, K, V, STAGES)),
                (decay_rows, (
                    g, segment_decay, rings, barriers, segment, token0, rows_left, head, scale, H, HG, K, C, SIGN, ADJOINT,
                    STAGES,
                )),
                (copy_chunks, (
                    k, v, g, rings, barriers, segment, token0, rows_left, head, H, HK, HV, HG, K, V, C, SIGN, EVEN, ADJOINT,
                    STAGES,
                )),
            ],
            [WARPS, WARPS, WARPS],
            [VALUE_REGISTERS, ROW_REGISTERS, COPY_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (add_up, (final, rings, barriers, segment, head, 0, H, K, V, STAGES)),
                (decay_rows, (
                    g, segment_decay, rings, barriers, segment, token0, rows_left, head, scale, H, HG, K, C, SIGN, ADJOINT,
                    STAGES,
                )),
                (copy_chunks, (
                    k, v, g, rings, barriers, segment, token0, rows_left, head, H, HK, HV, HG, K, V, C, SIGN, EVEN, ADJOINT,
                    STAGES,
                )),
            ],
            [WARPS, WARPS],
            [ROW_REGISTERS, COPY_REGISTERS],
        )  # fmt: skip
