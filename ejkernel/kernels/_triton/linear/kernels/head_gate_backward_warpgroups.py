"""`head_gate_backward` for Hopper, by warpgroups that do different things at one time.

For bfloat16, chunks of 64, whole tiles, with g and without dv:

    dA = (do v^T) * D scale                       D[t, s]: product of the decays after s up to t; 0 for s > t
    dq = scale pre * (do S^T) + dA k              S: the state before the chunk
    dk = suf * (v dS^T) + dA^T q                  dS: the adjoint of the state after it

and dg from sums over rows of these times q and k, as at the end of `head_gate_backward`. Memory bounds it: a chunk of 128
channels reads 128 KB, and its products take a quarter of that time.

There are as many programs as multiprocessors, which take the chunks of all heads in turn. A chunk is cut into tiles of 64 key
channels. Warpgroups hand chunks and tiles on through rings of slots in shared memory:

    copy_chunks     fills slots of chunks with do, v and log decays, slots of tiles with q, k, S and dS
    make_scores     dA, and the sum of S * dS
    make_rows       one warpgroup dq, another dk; that of dq also dg, from what the others have summed

Barriers of a chunk's slot: `full` when it is filled, `empty` when all have read it, `summed` when all is there that dg needs;
of a tile's: `tile_full` and `tile_empty`; of a slot of scores: `ready` and `taken`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from ejkernel.kernels._triton.linear.kernels.head_decays import RESET
from ejkernel.kernels._triton.linear.kernels.tiles import chunk_at
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
def _sum_before(a_before, a, b_before, b):
    """As `head_gate.sum_before`."""
    return a_before + a + b_before, b


@gluon.jit
def copy_chunks(
    q, k, v, gs, do, starts, ends, chunks, T, NT, units, rings, barriers,
    H: gl.constexpr, HK: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, SIGN: gl.constexpr,
    EVEN: gl.constexpr, SLOTS: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    do_ring, v_ring, log_ring, q_ring, k_ring, S_ring, dS_ring, _scores, _sums = rings
    full, empty, _summed, tile_full, tile_empty, _ready, _taken = barriers
    slot = 0
    phase = 1  # the first wait for a slot finds it empty
    tile = 0
    tile_phase = 1
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        head = unit % H
        kv = head // (H // HK)
        s = unit // H
        token, rows, _seq = chunk_at(chunks, s, T, NT, C, SIGN)
        if rows > 0:
            index = s.to(gl.int64) * H + head
            mbarrier.wait(empty.index(slot), phase)
            copy_rows(do, do_ring.index(slot), token, rows, head, 0, H, V, C, V, SIGN, EVEN)
            copy_rows(v, v_ring.index(slot), token, rows, kv, 0, HK, V, C, V, SIGN, EVEN)
            r = gl.arange(0, C, gl.BlockedLayout([1], [32], [WARPS], [0]))
            copy_async(log_ring.index(slot * 2), gs + index * C + r)
            copy_async(log_ring.index(slot * 2 + 1), gs + index * C + r - 1, mask=r > 0)
            async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
            slot, phase = next_slot(slot, phase, SLOTS)
            for a in gl.static_range(K // TILE):
                mbarrier.wait(tile_empty.index(tile), tile_phase)
                copy_rows(starts, S_ring.index(tile), index * K + a * TILE, TILE, 0, 0, 1, V, TILE, V, 1, True)
                copy_rows(ends, dS_ring.index(tile), index * K + a * TILE, TILE, 0, 0, 1, V, TILE, V, 1, True)
                copy_rows(q, q_ring.index(tile), token, rows, head, a * TILE, H, K, C, TILE, SIGN, EVEN)
                copy_rows(k, k_ring.index(tile), token, rows, kv, a * TILE, HK, K, C, TILE, SIGN, EVEN)
                async_copy.mbarrier_arrive(tile_full.index(tile), increment_count=False)
                tile, tile_phase = next_slot(tile, tile_phase, TILES)


@gluon.jit
def make_scores(
    chunks, scale, T, NT, units, rings, barriers,
    H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, SIGN: gl.constexpr, SLOTS: gl.constexpr,
    TILES: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    do_ring, v_ring, log_ring, _q, _k, S_ring, dS_ring, score_ring, sum_ring = rings
    full, empty, summed, tile_full, tile_empty, ready, taken = barriers
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, C, 16])
    LANES: gl.constexpr = V // 8
    rows_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    one_each: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    t = gl.arange(0, C, gl.SliceLayout(1, layout))[:, None]
    u = gl.arange(0, C, gl.SliceLayout(0, layout))[None, :]
    slot = 0
    phase = 0
    tile = 0
    tile_phase = 0
    place = 0
    turn = 1
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        _token, rows, _seq = chunk_at(chunks, unit // H, T, NT, C, SIGN)
        if rows > 0:
            logs = log_ring.index(slot * 2)
            mbarrier.wait(full.index(slot), phase)
            dA = warpgroup_mma(
                do_ring.index(slot),
                v_ring.index(slot).permute((1, 0)),
                gl.zeros([C, C], gl.float32, layout),
                use_acc=False,
                is_async=True,
            )  # [C, C]
            between = logs.load(gl.SliceLayout(1, layout))[:, None] - logs.load(gl.SliceLayout(0, layout))[None, :]
            D = gl.where(t >= u, exp_of_log(between), 0.0) * scale
            kept = gl.exp(logs.slice(C - 1, 1).load(one_each))  # [1]
            dA = warpgroup_mma_wait(0, deps=[dA]) * D
            # A row's score with itself has no decay. Apart from the others it cannot drown them where all decays are strong.
            itself = gl.sum(gl.where(t == u, dA, 0.0), 1)  # [C]
            mbarrier.wait(taken.index(place), turn)
            score_ring.index(place).store(gl.where(t > u, dA, 0.0).to(gl.bfloat16))
            sum_ring.index(slot * 5).store(itself)
            fence_async_shared()
            warpgroup_barrier()
            mbarrier.arrive(ready.index(place), count=1)
            mbarrier.arrive(empty.index(slot), count=1)
            through = 0.0
            for _a in gl.static_range(K // TILE):
                mbarrier.wait(tile_full.index(tile), tile_phase)
                S = S_ring.index(tile).load(rows_layout).to(gl.float32)  # [TILE, V]
                dS = dS_ring.index(tile).load(rows_layout).to(gl.float32)
                warpgroup_barrier()
                mbarrier.arrive(tile_empty.index(tile), count=1)
                through += gl.sum(gl.reshape(S * dS, [TILE * V]), 0)
                tile, tile_phase = next_slot(tile, tile_phase, TILES)
            sum_ring.index(slot * 5 + 1).slice(0, 1).store(kept * through)
            warpgroup_barrier()
            mbarrier.arrive(summed.index(slot), count=1)
            slot, phase = next_slot(slot, phase, SLOTS)
            place, turn = next_slot(place, turn, SCORES)


@gluon.jit
def _store_rows(
    out, value, token, rows, head, col, D: gl.constexpr, H: gl.constexpr, C: gl.constexpr, SIGN: gl.constexpr,
    EVEN: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Writes value [C, TILE] to columns from `col` on of a chunk's rows of out [tokens, H, D]."""
    # Two neighbours of float32 are a sector already; of bfloat16 they are exchanged within a warp first.
    by_row: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [8, 0], [0, 16], [0, 32]], [[0, 4], [0, 8], [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [64, 64]
    )
    out_layout: gl.constexpr = layout if out.dtype.element_ty == gl.float32 else by_row
    moved = gl.convert_layout(value.to(out.dtype.element_ty), out_layout)
    r = gl.arange(0, C, gl.SliceLayout(1, out_layout))[:, None]
    j = gl.arange(0, TILE, gl.SliceLayout(0, out_layout))[None, :]
    at = out + (token * H + head) * D + col + ((SIGN * H * D) * r + j)
    if EVEN:
        gl.store(at, moved)
    else:
        gl.store(at, moved, mask=(r < rows) & (j < D))


@gluon.jit
def _store_gate_gradient(dg, sum_ring, log_ring, slot, token, rows, head, H: gl.constexpr, C: gl.constexpr, SIGN: gl.constexpr):
    """dg [tokens, H] of a chunk, from vectors [C] of shared memory, as at the end of `head_gate_backward`."""
    layout: gl.constexpr = gl.BlockedLayout([C // 32], [32], [WARPS], [0])  # every warp has all rows
    r = gl.arange(0, C, layout)
    through = sum_ring.index(slot * 5 + 1).slice(0, 1).load(layout)  # [1]
    at_suffix = sum_ring.index(slot * 5 + 2).load(layout)
    balance = sum_ring.index(slot * 5 + 4).load(layout) - sum_ring.index(slot * 5 + 3).load(layout)
    kept_before, _ = gl.associative_scan((gl.zeros([C], gl.float32, layout), at_suffix), 0, _sum_before)
    dlog = gl.associative_scan(balance, 0, add, reverse=True) + kept_before + through
    own_log = log_ring.index(slot * 2).load(layout) - gl.where(r > 0, log_ring.index(slot * 2 + 1).load(layout), 0.0)
    dlog = gl.where(own_log > RESET, dlog, 0.0)
    gl.store(dg + (token + SIGN * r) * H + head, dlog, mask=r < rows)


@gluon.jit
def make_rows(
    out, dg, chunks, scale, T, NT, units, rings, barriers,
    OF_QUERY: gl.constexpr, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, SIGN: gl.constexpr,
    EVEN: gl.constexpr, SLOTS: gl.constexpr, TILES: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """out: dq with OF_QUERY, else dk."""
    do_ring, v_ring, log_ring, q_ring, k_ring, S_ring, dS_ring, score_ring, sum_ring = rings
    full, empty, summed, tile_full, tile_empty, ready, taken = barriers
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TILE, 16])
    of_row: gl.constexpr = gl.SliceLayout(1, layout)
    zero = gl.zeros([C, TILE], gl.float32, layout)
    slot = 0
    phase = 0
    tile = 0
    tile_phase = 0
    place = 0
    turn = 0
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        head = unit % H
        token, rows, _seq = chunk_at(chunks, unit // H, T, NT, C, SIGN)
        if rows > 0:
            logs = log_ring.index(slot * 2)
            scores = score_ring.index(place)  # [C, C]
            mbarrier.wait(full.index(slot), phase)
            if OF_QUERY:
                decay = exp_of_log(logs.load(of_row)) * scale
            else:
                decay = exp_of_log(logs.slice(C - 1, 1).load(of_row) - logs.load(of_row))
            at_suffix = gl.zeros([C], gl.float32, of_row)
            balance = gl.zeros([C], gl.float32, of_row)
            for a in gl.static_range(K // TILE):
                mbarrier.wait(tile_full.index(tile), tile_phase)
                if OF_QUERY:
                    x = warpgroup_mma(
                        do_ring.index(slot), S_ring.index(tile).permute((1, 0)), zero, use_acc=False, is_async=True
                    )  # [C, TILE]
                else:
                    x = warpgroup_mma(
                        v_ring.index(slot), dS_ring.index(tile).permute((1, 0)), zero, use_acc=False, is_async=True
                    )  # [C, TILE]
                if a == 0:
                    mbarrier.wait(ready.index(place), turn)
                    itself = sum_ring.index(slot * 5).load(of_row)
                if OF_QUERY:
                    y = warpgroup_mma(scores, k_ring.index(tile), zero, use_acc=False, is_async=True)  # [C, TILE]
                else:
                    y = warpgroup_mma(scores.permute((1, 0)), q_ring.index(tile), zero, use_acc=False, is_async=True)
                fq = q_ring.index(tile).load(layout).to(gl.float32)
                fk = k_ring.index(tile).load(layout).to(gl.float32)
                x, y = warpgroup_mma_wait(0, deps=[x, y])
                warpgroup_barrier()
                mbarrier.arrive(tile_empty.index(tile), count=1)
                if a == K // TILE - 1:
                    mbarrier.arrive(taken.index(place), count=1)
                x *= decay[:, None]
                if OF_QUERY:
                    x += y
                    balance += gl.sum(x * fq, 1)
                    x += itself[:, None] * fk
                else:
                    at_suffix += gl.sum(x * fk, 1)
                    balance += gl.sum(y * fk, 1)
                    x += y + itself[:, None] * fq
                _store_rows(out, x, token, rows, head, a * TILE, K, H, C, SIGN, EVEN, layout)
                tile, tile_phase = next_slot(tile, tile_phase, TILES)
            if OF_QUERY:
                sum_ring.index(slot * 5 + 4).store(balance)
                warpgroup_barrier()
                mbarrier.wait(summed.index(slot), phase)
                _store_gate_gradient(dg, sum_ring, log_ring, slot, token, rows, head, H, C, SIGN)
                warpgroup_barrier()
            else:
                sum_ring.index(slot * 5 + 2).store(at_suffix)
                sum_ring.index(slot * 5 + 3).store(balance)
                warpgroup_barrier()
                mbarrier.arrive(summed.index(slot), count=1)
            mbarrier.arrive(empty.index(slot), count=1)
            slot, phase = next_slot(slot, phase, SLOTS)
            place, turn = next_slot(place, turn, SCORES)


@gluon.jit
def head_gate_backward_by_warpgroups(
    q, k, v, gs, do, starts, ends, chunks, scale, T, NT, units,
    dq, dk, dg,
    H: gl.constexpr, HK: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, SIGN: gl.constexpr,
    EVEN: gl.constexpr, SLOTS: gl.constexpr, TILES: gl.constexpr, SCORES: gl.constexpr, COPY_REGISTERS: gl.constexpr,
    SCORE_REGISTERS: gl.constexpr, KEY_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Programs: any number, which share `units` = chunks * heads. Arguments as of `head_gate_backward`; K and V are 64 or 128,
    gs the running sums.

    SLOTS, TILES, SCORES: of chunks, of tiles of key channels and of scores. REGISTERS: of a thread of each kind of warpgroup;
    that of dq has the rest.
    """
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, V], gl.bfloat16)
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, TILE], gl.bfloat16)
    state: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, V], gl.bfloat16)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    do_ring = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, C, V], wide)
    v_ring = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, C, V], wide)
    log_ring = gl.allocate_shared_memory(gl.float32, [SLOTS * 2, C], flat)  # of each row, and of the one before it
    q_ring = gl.allocate_shared_memory(gl.bfloat16, [TILES, C, TILE], narrow)
    k_ring = gl.allocate_shared_memory(gl.bfloat16, [TILES, C, TILE], narrow)
    S_ring = gl.allocate_shared_memory(gl.bfloat16, [TILES, TILE, V], state)
    dS_ring = gl.allocate_shared_memory(gl.bfloat16, [TILES, TILE, V], state)
    score_ring = gl.allocate_shared_memory(gl.bfloat16, [SCORES, C, C], narrow)
    # Scores of rows with themselves; the chunk's decay times the sum of S * dS; sums of dk's rows at suf, and in all; of dq's.
    sum_ring = gl.allocate_shared_memory(gl.float32, [SLOTS * 5, C], flat)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    summed = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    tile_full = gl.allocate_shared_memory(gl.int64, [TILES, 1], mbarrier.MBarrierLayout())
    tile_empty = gl.allocate_shared_memory(gl.int64, [TILES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [SCORES, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [SCORES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=32 * WARPS)
        mbarrier.init(empty.index(i), count=3)
        mbarrier.init(summed.index(i), count=2)
    for i in gl.static_range(TILES):
        mbarrier.init(tile_full.index(i), count=32 * WARPS)
        mbarrier.init(tile_empty.index(i), count=3)
    for i in gl.static_range(SCORES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(taken.index(i), count=2)
    rings = (do_ring, v_ring, log_ring, q_ring, k_ring, S_ring, dS_ring, score_ring, sum_ring)
    barriers = (full, empty, summed, tile_full, tile_empty, ready, taken)
    gl.warp_specialize(
        [
            (make_rows, (
                dq, dg, chunks, scale, T, NT, units, rings, barriers, True, H, K, V, C, SIGN, EVEN, SLOTS, TILES, SCORES,
            )),
            (make_rows, (
                dk, dg, chunks, scale, T, NT, units, rings, barriers, False, H, K, V, C, SIGN, EVEN, SLOTS, TILES, SCORES,
            )),
            (make_scores, (
                chunks, scale, T, NT, units, rings, barriers, H, K, V, C, SIGN, SLOTS, TILES, SCORES,
            )),
            (copy_chunks, (
                q, k, v, gs, do, starts, ends, chunks, T, NT, units, rings, barriers, H, HK, K, V, C, SIGN, EVEN, SLOTS, TILES,
            )),
        ],
        [WARPS, WARPS, WARPS],
        [KEY_REGISTERS, SCORE_REGISTERS, COPY_REGISTERS],
    )  # fmt: skip
