"""`head_gate_scan` for Hopper, by warpgroups that do different things at one time; bfloat16, chunks of 64, whole tiles.

    o  = scale ((q k^T) * D) v + scale pre * (q S)          D[t, s]: product of the decays after s up to t; 0 for s > t
    S' = (the chunk's decay) S + (k suf)^T v

A program scans all value channels of a segment of one head, so q and k are read once. Its warpgroups hand chunks on through
rings of slots in shared memory:

    copy_chunks     fills slots with q, k, v and log decays
    make_scores     (q k^T) * D into a ring of its own, and k suf in place of k
    scan_values     one warpgroup for each 64 value channels, with their part of the state in registers

so that copies, exponentials and products of different chunks overlap. Barriers of a chunk's slot: `full` when it is filled,
`empty` when all have read it; of a slot of scores: `ready` and `taken`. In Gluon, which says what tl leaves to the compiler:
layouts, copies, waits.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from ejkernel.kernels._triton.linear.kernels.head_decays import constant_decay
from ejkernel.kernels._triton.linear.kernels.segments import chunk_in_turn, ends_sequence, rows_of_segment, scanned_segment
from ejkernel.kernels._triton.linear.kernels.tiles import program_at
from ejkernel.kernels._triton.linear.kernels.warpgroups import (
    TILE,
    WARPS,
    copy_async,
    copy_rows,
    exp_of_log,
    next_slot,
    store_tile,
    warpgroup_barrier,
)


@gluon.jit
def copy_chunks(
    q, k, v, gs, rings, barriers, segment, token0, rows_left, head,
    H: gl.constexpr, HQ: gl.constexpr, HK: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    C: gl.constexpr, SIGN: gl.constexpr, EVEN: gl.constexpr, ADJOINT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    TV: gl.constexpr = V // TILE
    q_ring, k_ring, v_ring, log_ring, _scores, _states = rings
    full, empty, _ready, _taken = barriers
    _g, first, count, _seq, _place, _total = segment
    slot = 0
    phase = 1  # the first wait for a slot finds it empty
    for n in range(count):
        s, token, rows = chunk_in_turn(first, count, token0, rows_left, n, ADJOINT, C, SIGN)
        mbarrier.wait(empty.index(slot), phase)
        copy_rows(q, q_ring.index(slot), token, rows, head // (H // HQ), 0, HQ, K, C, K, SIGN, EVEN)
        copy_rows(k, k_ring.index(slot), token, rows, head // (H // HK), 0, HK, K, C, K, SIGN, EVEN)
        for i in gl.static_range(TV):
            part = v_ring.index(slot * TV + i)
            copy_rows(v, part, token, rows, head // (H // HV), i * TILE, HV, V, C, TILE, SIGN, EVEN)
        if gs is not None:
            r = gl.arange(0, C, gl.BlockedLayout([1], [32], [WARPS], [0]))
            copy_async(log_ring.index(slot), gs + (s.to(gl.int64) * H + head) * C + r)
        async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
        slot, phase = next_slot(slot, phase, STAGES)


@gluon.jit
def _decays(logs, constant, rows, PREFIX: gl.constexpr, RUNNING: gl.constexpr, C: gl.constexpr, layout: gl.constexpr):
    """[C]: decay up to and with each row of a chunk (PREFIX), or after it. logs [C]: running sums, read where RUNNING."""
    r = gl.arange(0, C, layout)
    if RUNNING:
        log = logs.load(layout)
        if not PREFIX:
            log = logs.slice(C - 1, 1).load(layout) - log
    elif PREFIX:
        log = gl.minimum(r + 1, rows) * constant
    else:
        log = gl.maximum(rows - 1 - r, 0) * constant
    return exp_of_log(log)


@gluon.jit
def _decay_matrix(
    logs, constant, ADJOINT: gl.constexpr, RUNNING: gl.constexpr, GATED: gl.constexpr, C: gl.constexpr, layout: gl.constexpr
):  # fmt: skip
    """[C, C]: the decay from row s to row t, 0 for s > t; element [t, s], or [s, t] when ADJOINT."""
    r = gl.arange(0, C, gl.SliceLayout(1, layout))[:, None]
    c = gl.arange(0, C, gl.SliceLayout(0, layout))[None, :]
    if ADJOINT:
        seen = c >= r
    else:
        seen = r >= c
    if GATED:
        if RUNNING:
            between = logs.load(gl.SliceLayout(1, layout))[:, None] - logs.load(gl.SliceLayout(0, layout))[None, :]
        else:
            between = (r - c) * constant
        if ADJOINT:
            between = -between
        return gl.where(seen, exp_of_log(between), 0.0)
    else:
        return gl.where(seen, 1.0, 0.0)


@gluon.jit
def make_scores(
    rings, barriers, segment, token0, rows_left, constant, scale,
    RUNNING: gl.constexpr, GATED: gl.constexpr, K: gl.constexpr, C: gl.constexpr, SIGN: gl.constexpr, ADJOINT: gl.constexpr,
    STAGES: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    q_ring, k_ring, _values, log_ring, score_ring, _states = rings
    full, empty, ready, taken = barriers
    _g, first, count, _seq, _place, _total = segment
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, C, 16])
    LANES: gl.constexpr = K // 8
    rows_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    if not RUNNING:  # the same in every chunk
        D = _decay_matrix(log_ring.index(0), constant, ADJOINT, RUNNING, GATED, C, layout)
    slot = 0
    phase = 0
    place = 0
    turn = 1
    for n in range(count):
        _s, _token, rows = chunk_in_turn(first, count, token0, rows_left, n, ADJOINT, C, SIGN)
        mbarrier.wait(full.index(slot), phase)
        k = k_ring.index(slot)
        logs = log_ring.index(slot)
        A = warpgroup_mma(
            q_ring.index(slot), k.permute((1, 0)), gl.zeros([C, C], gl.float32, layout), use_acc=False, is_async=True
        )  # [C, C]
        if RUNNING:
            D = _decay_matrix(logs, constant, ADJOINT, RUNNING, GATED, C, layout)
        if GATED or ADJOINT:
            passed = k.load(rows_layout).to(gl.float32)  # [C, K]
            if GATED:
                passed *= _decays(logs, constant, rows, ADJOINT, RUNNING, C, gl.SliceLayout(1, rows_layout))[:, None]
            if ADJOINT:
                passed *= scale
        A = warpgroup_mma_wait(0, deps=[A]) * D
        if ADJOINT:  # the state holds scale times what it sums, since its beginning does
            A *= scale
        mbarrier.wait(taken.index(place), turn)
        score_ring.index(place).store(A.to(gl.bfloat16))
        if GATED or ADJOINT:
            k.store(passed.to(gl.bfloat16))
        fence_async_shared()
        warpgroup_barrier()
        mbarrier.arrive(ready.index(place), count=1)
        mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = next_slot(slot, phase, STAGES)
        place, turn = next_slot(place, turn, SCORES)


@gluon.jit
def _state_at_start(
    begin, ends, end_decay, segment, head, col, ADJOINT: gl.constexpr, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    STRIDE_K: gl.constexpr, STRIDE_V: gl.constexpr, DECAYS: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """[K, TILE]: as `segments.state_at_start`, of one decay a segment; without end_decay, ends are what segments start from."""
    g, _first, _count, seq, place, total = segment
    i = gl.arange(0, K, gl.SliceLayout(1, layout))[:, None]
    j = col + gl.arange(0, TILE, gl.SliceLayout(0, layout))[None, :]
    at = i * STRIDE_K + j * STRIDE_V
    S = gl.zeros([K, TILE], gl.float32, layout)
    if begin is not None:
        S += gl.load(begin + (seq.to(gl.int64) * H + head) * (K * V) + at).to(gl.float32)
    if ends is not None:
        if end_decay is None:
            S += gl.load(ends + (g.to(gl.int64) * H + head) * (K * V) + at)
        else:
            scanned_before = place
            if ADJOINT:
                scanned_before = total - 1 - place
            for n in range(scanned_before):
                other = (g - place + n).to(gl.int64) * H + head
                if ADJOINT:
                    other = (g - place + total - 1 - n).to(gl.int64) * H + head
                S = S * gl.load(end_decay + other * DECAYS) + gl.load(ends + other * (K * V) + at)
    return S


@gluon.jit
def scan_values(
    begin, ends, end_decay, o, final, states, rings, barriers, segment, token0, rows_left, constant, scale, head,
    PART: gl.constexpr, RUNNING: gl.constexpr, GATED: gl.constexpr, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    STRIDE_K: gl.constexpr, STRIDE_V: gl.constexpr, DECAYS: gl.constexpr, C: gl.constexpr, SIGN: gl.constexpr,
    EVEN: gl.constexpr, ADJOINT: gl.constexpr, STAGES: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """The value channels from PART * TILE on."""
    q_ring, k_ring, v_ring, log_ring, score_ring, state_ring = rings
    full, empty, ready, taken = barriers
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TILE, 16])
    rows_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    _g, first, count, seq, _place, _total = segment
    col = PART * TILE
    S = _state_at_start(begin, ends, end_decay, segment, head, col, ADJOINT, H, K, V, STRIDE_K, STRIDE_V, DECAYS, layout)
    low = state_ring.index(PART)  # S in bfloat16, a right operand
    low.store(S.to(gl.bfloat16))
    fence_async_shared()
    warpgroup_barrier()
    slot = 0
    phase = 0
    place = 0
    turn = 0
    for n in range(count):
        s, token, rows = chunk_in_turn(first, count, token0, rows_left, n, ADJOINT, C, SIGN)
        mbarrier.wait(full.index(slot), phase)
        v = v_ring.index(slot * (V // TILE) + PART)
        logs = log_ring.index(slot)
        q = q_ring.index(slot)
        bo = warpgroup_mma(q, low, gl.zeros([C, TILE], gl.float32, layout), use_acc=False, is_async=True)  # [C, TILE]
        if states is not None:
            i = gl.arange(0, K, gl.SliceLayout(1, rows_layout))[:, None]
            j = col + gl.arange(0, TILE, gl.SliceLayout(0, rows_layout))[None, :]
            gl.store(states + (s.to(gl.int64) * H + head) * (K * V) + (i * V + j), low.load(rows_layout))
        if GATED:
            seen = _decays(logs, constant, rows, not ADJOINT, RUNNING, C, gl.SliceLayout(1, layout))
            if RUNNING:
                kept = exp_of_log(logs.slice(C - 1, 1).load(gl.SliceLayout(1, layout)))[:, None]
            else:
                kept = gl.exp(rows * constant)
            S *= kept
        mbarrier.wait(ready.index(place), turn)
        bo = warpgroup_mma_wait(0, deps=[bo])
        if GATED:
            bo *= seen[:, None]
        bo = warpgroup_mma(score_ring.index(place), v, bo, is_async=True)  # [C, TILE]
        S = warpgroup_mma(k_ring.index(slot).permute((1, 0)), v, S, is_async=True)  # [K, TILE]
        bo = warpgroup_mma_wait(1, deps=[bo])
        if not ADJOINT:
            bo *= scale
        S = warpgroup_mma_wait(0, deps=[S])
        low.store(S.to(gl.bfloat16))
        fence_async_shared()
        warpgroup_barrier()
        mbarrier.arrive(empty.index(slot), count=1)
        mbarrier.arrive(taken.index(place), count=1)
        store_tile(o, bo, token, rows, head, col, H, V, C, SIGN, EVEN)
        slot, phase = next_slot(slot, phase, STAGES)
        place, turn = next_slot(place, turn, SCORES)
    if final is not None:
        if ends_sequence(segment, ADJOINT):
            i = gl.arange(0, K, gl.SliceLayout(1, layout))[:, None]
            j = col + gl.arange(0, TILE, gl.SliceLayout(0, layout))[None, :]
            gl.store(final + (seq.to(gl.int64) * H + head) * (K * V) + (i * V + j), S)


@gluon.jit
def head_gate_scan_by_warpgroups(
    q, k, v, gs, gamma, begin, ends, end_decay, chunks, segments, scale, T, NT, NS, SC,
    o, final, states,
    H: gl.constexpr, HQ: gl.constexpr, HK: gl.constexpr, HV: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    STRIDE_K: gl.constexpr, STRIDE_V: gl.constexpr, DECAYS: gl.constexpr, C: gl.constexpr, SIGN: gl.constexpr,
    EVEN: gl.constexpr, ADJOINT: gl.constexpr, STAGES: gl.constexpr, SCORES: gl.constexpr, COPY_REGISTERS: gl.constexpr,
    SCORE_REGISTERS: gl.constexpr, VALUE_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Programs: segments * heads. Arguments as of `head_gate_scan`; K and V are 64 or 128, gs the running sums.

    STAGES, SCORES: slots of chunks and of scores. REGISTERS: of a thread of each kind of warpgroup; the first of `scan_values`
    has the rest.
    """
    RUNNING: gl.constexpr = gs is not None
    GATED: gl.constexpr = (gs is not None) or (gamma is not None)
    TV: gl.constexpr = V // TILE
    _tile, head, unit = program_at(1, H)
    segment, idle = scanned_segment(segments, unit, NT, NS, SC, ADJOINT, False)
    if idle:
        return
    _g, first, count, seq, _place, _total = segment
    constant = constant_decay(gamma, seq, head, H)
    token0, rows_left = rows_of_segment(chunks, first, count, T, NT, C, SIGN)
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], gl.bfloat16)
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, TILE], gl.bfloat16)
    q_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], wide)
    k_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], wide)
    v_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES * TV, C, TILE], narrow)
    log_ring = gl.allocate_shared_memory(gl.float32, [STAGES, C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    score_ring = gl.allocate_shared_memory(gl.bfloat16, [SCORES, C, C], narrow)
    state_ring = gl.allocate_shared_memory(gl.bfloat16, [TV, K, TILE], narrow)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [SCORES, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [SCORES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=32 * WARPS)
        mbarrier.init(empty.index(i), count=TV + 1)
    for i in gl.static_range(SCORES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(taken.index(i), count=TV)
    rings = (q_ring, k_ring, v_ring, log_ring, score_ring, state_ring)
    barriers = (full, empty, ready, taken)
    if TV == 2:
        gl.warp_specialize(
            [
                (scan_values, (
                    begin, ends, end_decay, o, final, states, rings, barriers, segment, token0, rows_left, constant, scale,
                    head, 0, RUNNING, GATED, H, K, V, STRIDE_K, STRIDE_V, DECAYS, C, SIGN, EVEN, ADJOINT, STAGES, SCORES,
                )),
                (scan_values, (
                    begin, ends, end_decay, o, final, states, rings, barriers, segment, token0, rows_left, constant, scale,
                    head, 1, RUNNING, GATED, H, K, V, STRIDE_K, STRIDE_V, DECAYS, C, SIGN, EVEN, ADJOINT, STAGES, SCORES,
                )),
                (make_scores, (
                    rings, barriers, segment, token0, rows_left, constant, scale, RUNNING, GATED, K, C, SIGN, ADJOINT, STAGES,
                    SCORES,
                )),
                (copy_chunks, (
                    q, k, v, gs, rings, barriers, segment, token0, rows_left, head, H, HQ, HK, HV, K, V, C, SIGN, EVEN, ADJOINT,
                    STAGES,
                )),
            ],
            [WARPS, WARPS, WARPS],
            [VALUE_REGISTERS, SCORE_REGISTERS, COPY_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (scan_values, (
                    begin, ends, end_decay, o, final, states, rings, barriers, segment, token0, rows_left, constant, scale,
                    head, 0, RUNNING, GATED, H, K, V, STRIDE_K, STRIDE_V, DECAYS, C, SIGN, EVEN, ADJOINT, STAGES, SCORES,
                )),
                (make_scores, (
                    rings, barriers, segment, token0, rows_left, constant, scale, RUNNING, GATED, K, C, SIGN, ADJOINT, STAGES,
                    SCORES,
                )),
                (copy_chunks, (
                    q, k, v, gs, rings, barriers, segment, token0, rows_left, head, H, HQ, HK, HV, K, V, C, SIGN, EVEN, ADJOINT,
                    STAGES,
                )),
            ],
            [WARPS, WARPS],
            [SCORE_REGISTERS, COPY_REGISTERS],
        )  # fmt: skip
