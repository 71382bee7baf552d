"""How chunks come to the scans of `scans_by_warpgroups`: rings of slots in shared memory, and the warpgroup that fills them.

Barriers of a slot: see `barriers_of`. The letters are those of `scans`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from ejkernel.kernels._triton.linear.kernels.segments import chunk_in_turn
from ejkernel.kernels._triton.linear.kernels.warpgroups import (
    TILE,
    WARPS,
    copy_async,
    copy_numbers,
    copy_rows,
    exp_of_log,
    next_slot,
    warpgroup_barrier,
)


@gluon.jit
def _copy_lower(x, slot, index, C: gl.constexpr):
    """Matrix `index` of x, as `load_lower` reads it."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    t = gl.arange(0, C, gl.SliceLayout(1, layout))[:, None]
    s = gl.arange(0, C, gl.SliceLayout(0, layout))[None, :]
    copy_async(slot, x + index * (C * C) + (t * C + s), mask=t // 16 >= s // 16)


@gluon.jit
def _copy_keys(
    k, ks, chunk_decay, betas, gs, Z, rings, slot, index, token, rows, head,
    H: gl.constexpr, HK: gl.constexpr, K: gl.constexpr, C: gl.constexpr, SIGN: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """What every scan reads of a chunk."""
    k_ring, after_ring, z_ring, beta_ring, log_ring, decay_ring = rings
    if ks is not None:
        copy_rows(k, k_ring.index(slot), index * C, C, 0, 0, 1, K, C, K, 1, True)
        copy_rows(ks, after_ring.index(slot), index * C, C, 0, 0, 1, K, C, K, 1, True)
        copy_numbers(chunk_decay, decay_ring.index(slot), index, K)
    else:
        copy_rows(k, k_ring.index(slot), token, rows, head // (H // HK), 0, HK, K, C, K, SIGN, EVEN)
    _copy_lower(Z, z_ring.index(slot), index, C)
    copy_numbers(betas, beta_ring.index(slot), index, C)
    if gs is not None:
        copy_numbers(gs, log_ring.index(slot), index, C)


@gluon.jit
def _make_scores(scores, query_rings, key_rings, barriers, slot, phase, index, scale, RUNNING: gl.constexpr, C: gl.constexpr):
    """N of the chunk in a slot: q k^T times decays and scale, 0 for s > t; also in matrix `index` of scores where kept."""
    q_ring, score_ring = query_rings
    k_ring, _after, _z, _beta, log_ring, _decay = key_rings
    full, _empty, scored, _summed = barriers
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, C, 16])
    mbarrier.wait(full.index(slot), phase)
    keys = k_ring.index(slot).permute((1, 0))
    N = warpgroup_mma(q_ring.index(slot), keys, gl.zeros([C, C], gl.float32, layout), use_acc=False, is_async=True)
    t = gl.arange(0, C, gl.SliceLayout(1, layout))[:, None]
    s = gl.arange(0, C, gl.SliceLayout(0, layout))[None, :]
    if RUNNING:
        logs = log_ring.index(slot)
        between = logs.load(gl.SliceLayout(1, layout))[:, None] - logs.load(gl.SliceLayout(0, layout))[None, :]
        decay = gl.where(t >= s, exp_of_log(between) * scale, 0.0)
    else:
        decay = gl.where(t >= s, scale, 0.0)
    N = warpgroup_mma_wait(0, deps=[N])
    made = score_ring.index(slot)
    made.store((N * decay).to(gl.bfloat16))
    fence_async_shared()
    warpgroup_barrier()
    mbarrier.arrive(scored.index(slot), count=1)
    if scores is not None:
        rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
        t = gl.arange(0, C, gl.SliceLayout(1, rows))[:, None]
        s = gl.arange(0, C, gl.SliceLayout(0, rows))[None, :]
        gl.store(scores + index * (C * C) + (t * C + s), made.load(rows), mask=t // 16 >= s // 16)


@gluon.jit
def copy_chunks(
    q, k, ks, N, chunk_decay, v, errors, betas, gs, Z, scores, query_rings, value_rings, key_rings, barriers, segment, token0,
    rows_left, scale, head,
    H: gl.constexpr, HK: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, SIGN: gl.constexpr,
    EVEN: gl.constexpr, ADJOINT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    q_ring, score_ring = query_rings
    v_ring, error_ring = value_rings
    full, empty, _scored, _summed = barriers
    TV: gl.constexpr = V // TILE
    _g, first, count, _seq, _place, _total = segment
    slot = 0
    phase = 1  # the first wait for a slot finds it empty
    behind = 0  # the slot whose scores are made next
    turn = 0
    index_behind = first.to(gl.int64) * H + head
    for n in range(count):
        s, token, rows = chunk_in_turn(first, count, token0, rows_left, n, ADJOINT, C, SIGN)
        index = s.to(gl.int64) * H + head
        mbarrier.wait(empty.index(slot), phase)
        _copy_keys(k, ks, chunk_decay, betas, gs, Z, key_rings, slot, index, token, rows, head, H, HK, K, C, SIGN, EVEN)
        if ks is not None:
            copy_rows(q, q_ring.index(slot), index * C, C, 0, 0, 1, K, C, K, 1, True)
        else:
            copy_rows(q, q_ring.index(slot), token, rows, head // (H // HK), 0, HK, K, C, K, SIGN, EVEN)
        for i in gl.static_range(TV):
            copy_rows(v, v_ring.index(slot * TV + i), token, rows, head, i * TILE, H, V, C, TILE, SIGN, EVEN)
            if errors is not None:
                copy_rows(errors, error_ring.index(slot * TV + i), token, rows, head, i * TILE, H, V, C, TILE, SIGN, EVEN)
        if N is not None:
            _copy_lower(N, score_ring.index(slot), index, C)
        async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
        slot, phase = next_slot(slot, phase, STAGES)
        if N is None:
            if n > 0:
                _make_scores(scores, query_rings, key_rings, barriers, behind, turn, index_behind, scale, gs is not None, C)
                behind, turn = next_slot(behind, turn, STAGES)
            index_behind = index
    if N is None:
        if count > 0:
            _make_scores(scores, query_rings, key_rings, barriers, behind, turn, index_behind, scale, gs is not None, C)


@gluon.jit
def rings_of_keys(ROWS: gl.constexpr, RUNNING: gl.constexpr, K: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr):
    """What `_copy_keys` fills. Where there is nothing to copy, a ring that is not read."""
    rows: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], gl.bfloat16)
    matrix: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    numbers: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    k_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], rows)
    z_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, C], matrix)
    beta_ring = gl.allocate_shared_memory(gl.float32, [STAGES, C], numbers)
    after_ring = k_ring
    log_ring = beta_ring
    decay_ring = beta_ring
    if ROWS:
        after_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], rows)
        decay_ring = gl.allocate_shared_memory(gl.float32, [STAGES, K], numbers)
    elif RUNNING:
        log_ring = gl.allocate_shared_memory(gl.float32, [STAGES, C], numbers)
    return k_ring, after_ring, z_ring, beta_ring, log_ring, decay_ring


@gluon.jit
def rings_of_queries(K: gl.constexpr, C: gl.constexpr, STAGES: gl.constexpr):
    q_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], gl.NVMMASharedLayout.get_default_for([C, K], gl.bfloat16))
    score_ring = gl.allocate_shared_memory(
        gl.bfloat16, [STAGES, C, C], gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    )
    return q_ring, score_ring


@gluon.jit
def ring_of_tiles(SLOTS: gl.constexpr, R: gl.constexpr):
    """[SLOTS, R, TILE]."""
    return gl.allocate_shared_memory(
        gl.bfloat16, [SLOTS, R, TILE], gl.NVMMASharedLayout.get_default_for([R, TILE], gl.bfloat16)
    )


@gluon.jit
def barriers_of(TV: gl.constexpr, STAGES: gl.constexpr):
    """Of every slot: `full` when it is filled, `empty` when all have read it, `scored` when N is made, `summed` when the second
    warpgroup has its part of dbeta."""
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    scored = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    summed = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=32 * WARPS)
        mbarrier.init(empty.index(i), count=TV)
        mbarrier.init(scored.index(i), count=1)
        mbarrier.init(summed.index(i), count=1)
    return full, empty, scored, summed


@gluon.jit
def decays_upto(logs, layout: gl.constexpr):
    """[1, C]: the decay of a head up to and with each row."""
    return exp_of_log(logs.load(gl.SliceLayout(0, layout)))[None, :]


@gluon.jit
def decays_after(logs, C: gl.constexpr, layout: gl.constexpr):
    """[1, C]: the decay of a head after each row."""
    whole = logs.slice(C - 1, 1).load(gl.SliceLayout(0, layout))
    return exp_of_log(whole - logs.load(gl.SliceLayout(0, layout)))[None, :]
