"""`scan_rows_wide` for Hopper, by warpgroups that do different things at one time; bfloat16, 256 key channels, whole tiles.

    o = A v + qd S,   S' = D S + kd^T v                                        with the letters of `rows_scan`

A program scans 128 value channels of a segment of one head. Its warpgroups hand chunks on through a ring of slots in shared
memory:

    copy_chunks     fills slots with the rows, scores, values and decays of chunks to come
    scan_values     one warpgroup for each 64 value channels, with their part of the state in registers

All is transposed, [value channels, rows or key channels], and the state is kept in two parts of 128 key channels: it is the
left operand of its product with q, which the tensor cores take from registers. So nothing on the way from one state to the
next passes through shared memory. The state takes 128 registers of a thread and its copy in bfloat16 32 for each part, so the
second part's is made when the product of the first is done; meanwhile the other warpgroup's products run.

ADJOINT goes back in time with kd for qd, qd for kd and do for v: o is then dv, states the adjoints after every chunk.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ejkernel.kernels._triton.linear.kernels.segments import chunk_in_turn, ends_sequence, rows_of_segment, scanned_segment
from ejkernel.kernels._triton.linear.kernels.tiles import program_at
from ejkernel.kernels._triton.linear.kernels.warpgroups import (
    TILE,
    WARPS,
    barriers_of,
    copy_numbers,
    copy_rows,
    copy_tile,
    next_slot,
    store_turned,
    warpgroup_barrier,
)

HALF = gl.constexpr(128)  # key channels of each part of a state
KEYS = gl.constexpr(256)


@gluon.jit
def copy_chunks(
    qd, q_decay, kd, chunk_decay, A, A_low, v, rings, barriers, segment, token0, rows_left, head, col,
    H: gl.constexpr, HV: gl.constexpr, V: gl.constexpr, C: gl.constexpr, SIGN: gl.constexpr, EVEN: gl.constexpr,
    ADJOINT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q_ring, k_ring, v_ring, score_ring, low_ring, decay_ring, q_decay_ring = rings
    full, empty = barriers
    _g, first, count, _seq, _place, _total = segment
    slot = 0
    phase = 1  # the first wait for a slot finds it empty
    for n in range(count):
        s, token, rows = chunk_in_turn(first, count, token0, rows_left, n, ADJOINT, C, SIGN)
        index = s.to(gl.int64) * H + head
        mbarrier.wait(empty.index(slot), phase)
        for i in gl.static_range(2):
            part = q_ring.index(slot * 2 + i)
            if q_decay is None:
                copy_tile(qd, part, index * C, i * HALF, KEYS, C, HALF)
            else:
                copy_rows(qd, part, token, rows, head, i * HALF, H, KEYS, C, HALF, SIGN, EVEN)
            copy_tile(kd, k_ring.index(slot * 2 + i), index * C, i * HALF, KEYS, C, HALF)
            part = v_ring.index(slot * 2 + i)
            copy_rows(v, part, token, rows, head // (H // HV), col + i * TILE, HV, V, C, TILE, SIGN, EVEN)
        copy_tile(A, score_ring.index(slot), index * C, 0, C, C, C)
        if A_low is not None:
            copy_tile(A_low, low_ring.index(slot), index * C, 0, C, C, C)
        copy_numbers(chunk_decay, decay_ring.index(slot), index, KEYS)
        if q_decay is not None:
            copy_numbers(q_decay, q_decay_ring.index(slot), index, C)
        async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
        slot, phase = next_slot(slot, phase, STAGES)


@gluon.jit
def _tile_of_state(x, index, KEY_PART: gl.constexpr, col, V: gl.constexpr, layout: gl.constexpr):
    """[TILE, HALF]: where value channels from `col` on of a part of state `index` of x [states, KEYS, V] lie."""
    i = col + gl.arange(0, TILE, gl.SliceLayout(1, layout))[:, None]
    j = KEY_PART * HALF + gl.arange(0, HALF, gl.SliceLayout(0, layout))[None, :]
    return x + index * (KEYS * V) + (i + j * V)


@gluon.jit
def _state_at_start(
    begin, ends, end_decay, segment, head, KEY_PART: gl.constexpr, col, ADJOINT: gl.constexpr, H: gl.constexpr, V: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """[TILE, HALF]: as `segments.state_at_start`, of a decay per key channel."""
    g, _first, _count, seq, place, total = segment
    S = gl.zeros([TILE, HALF], gl.float32, layout)
    if begin is not None:
        S += gl.load(_tile_of_state(begin, seq.to(gl.int64) * H + head, KEY_PART, col, V, layout)).to(gl.float32)
    if ends is not None:
        j = KEY_PART * HALF + gl.arange(0, HALF, gl.SliceLayout(0, layout))
        scanned_before = place
        if ADJOINT:
            scanned_before = total - 1 - place
        for n in range(scanned_before):
            other = (g - place + n).to(gl.int64) * H + head
            if ADJOINT:
                other = (g - place + total - 1 - n).to(gl.int64) * H + head
            kept = gl.load(end_decay + other * KEYS + j)[None, :]
            S = S * kept + gl.load(_tile_of_state(ends, other, KEY_PART, col, V, layout))
    return S


@gluon.jit
def _decayed(S, decays, KEY_PART: gl.constexpr, ALIKE: gl.constexpr, layout: gl.constexpr):
    """A part of the state times the chunk's decay of each of its key channels, or of all."""
    if ALIKE:
        return S * decays.slice(0, 1).load(gl.SliceLayout(0, layout))[None, :]
    else:
        return S * decays.slice(KEY_PART * HALF, HALF).load(gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def _store_part(states, S, staging, index, KEY_PART: gl.constexpr, col, V: gl.constexpr):
    """Writes S [TILE, HALF] to state `index` of states [states, KEYS, V], by way of staging [HALF, TILE]."""
    store_turned(states, S, staging, index * KEYS + KEY_PART * HALF, HALF, 0, col, 1, V, HALF, 1, True)
    warpgroup_barrier()


@gluon.jit
def scan_values(
    begin, ends, end_decay, o, final, states, rings, barriers, staging, segment, token0, rows_left, head, first_col,
    PART: gl.constexpr, LOW: gl.constexpr, DECAYED: gl.constexpr, ALIKE: gl.constexpr, H: gl.constexpr, V: gl.constexpr,
    C: gl.constexpr, SIGN: gl.constexpr, EVEN: gl.constexpr, ADJOINT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The value channels from first_col + PART * TILE on. LOW: scores have a low part; DECAYED: q comes without its decays."""
    q_ring, k_ring, v_ring, score_ring, low_ring, decay_ring, q_decay_ring = rings
    full, empty = barriers
    of_state: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, HALF, 16])
    of_rows: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, C, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, of_rows, 2)
    _g, first, count, seq, _place, _total = segment
    col = first_col + PART * TILE
    own = staging.index(PART)
    S0 = _state_at_start(begin, ends, end_decay, segment, head, 0, col, ADJOINT, H, V, of_state)
    S1 = _state_at_start(begin, ends, end_decay, segment, head, 1, col, ADJOINT, H, V, of_state)
    zero = gl.zeros([TILE, C], gl.float32, of_rows)
    slot = 0
    phase = 0
    for n in range(count):
        s, token, rows = chunk_in_turn(first, count, token0, rows_left, n, ADJOINT, C, SIGN)
        v = v_ring.index(slot * 2 + PART).permute((1, 0))  # [TILE, C]
        read = gl.convert_layout(S0.to(gl.bfloat16), left)
        mbarrier.wait(full.index(slot), phase)
        if states is not None:
            _store_part(states, S0, own, s.to(gl.int64) * H + head, 0, col, V)
        # Before products are on their way: the compiler waits for all of them where a former result is changed in between.
        S0 = _decayed(S0, decay_ring.index(slot), 0, ALIKE, of_state)
        bo = warpgroup_mma(read, q_ring.index(slot * 2).permute((1, 0)), zero, use_acc=False, is_async=True)  # [TILE, C]
        bo, read = warpgroup_mma_wait(0, deps=[bo, read])
        read = gl.convert_layout(S1.to(gl.bfloat16), left)
        if states is not None:
            _store_part(states, S1, own, s.to(gl.int64) * H + head, 1, col, V)
        S1 = _decayed(S1, decay_ring.index(slot), 1, ALIKE, of_state)
        bo = warpgroup_mma(read, q_ring.index(slot * 2 + 1).permute((1, 0)), bo, is_async=True)
        if DECAYED:
            bo, read = warpgroup_mma_wait(0, deps=[bo, read])
            bo *= q_decay_ring.index(slot).load(gl.SliceLayout(0, of_rows))[None, :]
        scores = score_ring.index(slot)
        bo = warpgroup_mma(v, scores if ADJOINT else scores.permute((1, 0)), bo, is_async=True)
        if LOW:
            scores = low_ring.index(slot)
            bo = warpgroup_mma(v, scores if ADJOINT else scores.permute((1, 0)), bo, is_async=True)
        S0 = warpgroup_mma(v, k_ring.index(slot * 2), S0, is_async=True)  # [TILE, HALF]
        S1 = warpgroup_mma(v, k_ring.index(slot * 2 + 1), S1, is_async=True)
        bo, read = warpgroup_mma_wait(2, deps=[bo, read])
        store_turned(o, bo, own.slice(0, C), token, rows, head, col, H, V, C, SIGN, EVEN)
        S0, S1 = warpgroup_mma_wait(0, deps=[S0, S1])
        warpgroup_barrier()
        mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = next_slot(slot, phase, STAGES)
    if ends_sequence(segment, ADJOINT):
        index = seq.to(gl.int64) * H + head
        gl.store(_tile_of_state(final, index, 0, col, V, of_state), S0)
        gl.store(_tile_of_state(final, index, 1, col, V, of_state), S1)


@gluon.jit
def wide_scan_by_warpgroups(
    qd, q_decay, kd, chunk_decay, A, A_low, v, begin, ends, end_decay, chunks, segments, T, NT, NS, SC,
    o, final, states,
    H: gl.constexpr, HV: gl.constexpr, V: gl.constexpr, C: gl.constexpr, SIGN: gl.constexpr, EVEN: gl.constexpr,
    ADJOINT: gl.constexpr, ALIKE: gl.constexpr, STAGES: gl.constexpr, COPY_REGISTERS: gl.constexpr,
    VALUE_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Programs: tiles of 128 value channels * segments * heads. Arguments as of `scan_rows_wide`; V is a multiple of 128.

    STAGES: slots of chunks. REGISTERS: of a thread of each kind of warpgroup; the first of `scan_values` has the rest.
    """
    LOW: gl.constexpr = A_low is not None
    DECAYED: gl.constexpr = q_decay is not None
    tile, head, unit = program_at(V // (2 * TILE), H)
    segment, idle = scanned_segment(segments, unit, NT, NS, SC, ADJOINT, False)
    if idle:
        return
    col = tile * (2 * TILE)
    _g, first, count, _seq, _place, _total = segment
    token0, rows_left = rows_of_segment(chunks, first, count, T, NT, C, SIGN)
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, HALF], gl.bfloat16)
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, TILE], gl.bfloat16)
    matrix: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2, C, HALF], wide)
    k_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2, C, HALF], wide)
    v_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES * 2, C, TILE], narrow)
    score_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], matrix)
    decay_ring = gl.allocate_shared_memory(gl.float32, [STAGES, KEYS], flat)
    low_ring = score_ring
    if LOW:
        low_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], matrix)
    q_decay_ring = decay_ring
    if DECAYED:
        q_decay_ring = gl.allocate_shared_memory(gl.float32, [STAGES, C], flat)
    half: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HALF, TILE], gl.bfloat16)
    staging = gl.allocate_shared_memory(gl.bfloat16, [2, HALF, TILE], half)
    rings = (q_ring, k_ring, v_ring, score_ring, low_ring, decay_ring, q_decay_ring)
    barriers = (barriers_of(STAGES, 32 * WARPS), barriers_of(STAGES, 2))
    gl.warp_specialize(
        [
            (scan_values, (
                begin, ends, end_decay, o, final, states, rings, barriers, staging, segment, token0, rows_left, head, col, 0,
                LOW, DECAYED, ALIKE, H, V, C, SIGN, EVEN, ADJOINT, STAGES,
            )),
            (scan_values, (
                begin, ends, end_decay, o, final, states, rings, barriers, staging, segment, token0, rows_left, head, col, 1,
                LOW, DECAYED, ALIKE, H, V, C, SIGN, EVEN, ADJOINT, STAGES,
            )),
            (copy_chunks, (
                qd, q_decay, kd, chunk_decay, A, A_low, v, rings, barriers, segment, token0, rows_left, head, col, H, HV, V, C,
                SIGN, EVEN, ADJOINT, STAGES,
            )),
        ],
        [WARPS, WARPS],
        [VALUE_REGISTERS, COPY_REGISTERS],
    )  # fmt: skip
