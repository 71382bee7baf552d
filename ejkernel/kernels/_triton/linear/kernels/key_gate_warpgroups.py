"""Weakly gated segments of a gate per key channel on Hopper in one scan of q, k, v, g; bfloat16, chunks of 64, whole tiles.

In a chunk, with c the sum of log decays from the middle of its rows (negative for rows after it, positive before), a row reads
q~ = q exp(c) and leaves k~ = k exp(-c), and the state M that stands in the middle is that of the chunk's beginning times the
decay of its first half:

    M  = exp(sum of the first half) S          o  = scale (q~ M + tril(q~ k~^T) v)
    M' = M + k~^T v                            S' = exp(sum of the second half) M'

While |c| stays within LIMIT / 2 in every channel nothing overflows, and nothing is lost that bfloat16 would keep. A program
leaves its segment at the first chunk where it does not, or that is not weakly gated by the measure of `weak_rows`, which the
gradient goes by; `done` says so, and `weak_rows`, `gated_rows` and `scan_rows` do all of it.

A program scans all value channels of a segment of one head. Its warpgroups hand chunks on through rings of slots in shared
memory, as in `head_gate_warpgroups`:

    copy_chunks     fills slots with q, k, v and log decays
    make_scores     q~ and k~ in place of q and k, the halves' decays, and tril(q~ k~^T) into a ring of its own
    scan_values     one warpgroup for each 64 value channels, with their part of the state in registers

Barriers of a chunk's slot: `full` when it is filled, `empty` when all have read it; of a slot of scores: `ready` and `taken`.

ADJOINT goes back in time with k for q, q for k and do for v: o is then dv, states the adjoints after every chunk.
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
    add,
    copy_rows,
    exp2,
    next_slot,
    split_bfloat16,
    store_tile,
    warpgroup_barrier,
)


@gluon.jit
def _left(verdict):
    """Whether a chunk's slot says that the segment is left there."""
    return gl.max(verdict.load(gl.BlockedLayout([1], [32], [WARPS], [0])), 0) != 0


@gluon.jit
def copy_chunks(
    q, k, v, g, rings, barriers, segment, token0, rows_left, head,
    H: gl.constexpr, HQ: gl.constexpr, HK: gl.constexpr, HV: gl.constexpr, HG: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, C: gl.constexpr, SIGN: gl.constexpr, EVEN: gl.constexpr, ADJOINT: gl.constexpr, CHECKED: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    TV: gl.constexpr = V // TILE
    q_ring, k_ring, v_ring, g_ring, _low, _decays, _scores, _states, verdicts = rings
    full, empty, _ready, _taken = barriers
    _g, first, count, _seq, _place, _total = segment
    slot = 0
    phase = 1  # the first wait for a slot finds it empty
    turns = count
    n = 0
    while n < turns:
        _s, token, rows = chunk_in_turn(first, count, token0, rows_left, n, ADJOINT, C, SIGN)
        mbarrier.wait(empty.index(slot), phase)
        left = False
        if CHECKED:
            if n >= STAGES:
                left = _left(verdicts.index(slot))
        if left:
            turns = 0
        else:
            copy_rows(g, g_ring.index(slot), token, rows, head // (H // HG), 0, HG, K, C, K, SIGN, EVEN)
            copy_rows(q, q_ring.index(slot), token, rows, head // (H // HQ), 0, HQ, K, C, K, SIGN, EVEN)
            copy_rows(k, k_ring.index(slot), token, rows, head // (H // HK), 0, HK, K, C, K, SIGN, EVEN)
            for i in gl.static_range(TV):
                part = v_ring.index(slot * TV + i)
                copy_rows(v, part, token, rows, head // (H // HV), i * TILE, HV, V, C, TILE, SIGN, EVEN)
            async_copy.mbarrier_arrive(full.index(slot), increment_count=False)
        slot, phase = next_slot(slot, phase, STAGES)
        n += 1
    async_copy.commit_group()
    async_copy.wait_group(0)  # nothing is still written when a program ends that has left its segment


@gluon.jit
def _store_split(x, high, low):
    """bfloat16's high and low part of x [C, K]."""
    high_part, low_part = split_bfloat16(x)
    high.store(high_part)
    low.store(low_part)


@gluon.jit
def make_scores(
    done, rings, barriers, segment, head, scale,
    H: gl.constexpr, K: gl.constexpr, C: gl.constexpr, ADJOINT: gl.constexpr, LIMIT: gl.constexpr, STAGES: gl.constexpr,
    SCORES: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    q_ring, k_ring, _values, g_ring, k_low, decay_ring, score_ring, _states, verdicts = rings
    full, empty, ready, taken = barriers
    _g, first, count, _seq, _place, _total = segment
    HALF: gl.constexpr = C // 2
    LANES: gl.constexpr = K // 64
    # A thread has all rows of half a chunk for one or two channels: running sums need no other.
    by_half: gl.constexpr = gl.BlockedLayout([1, HALF, LANES], [1, 1, 32], [2, 1, 2], [2, 1, 0])
    by_row: gl.constexpr = gl.BlockedLayout([HALF, LANES], [1, 32], [2, 2], [1, 0])
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, C, 16])
    is_first = gl.arange(0, 2, gl.SliceLayout(1, gl.SliceLayout(2, by_half)))[:, None, None] == 0
    t = gl.arange(0, C, gl.SliceLayout(1, layout))[:, None]
    s = gl.arange(0, C, gl.SliceLayout(0, layout))[None, :]
    if ADJOINT:
        seen = s >= t
    else:
        seen = t >= s
    slot = 0
    phase = 0
    place = 0
    turn = 1
    turns = count
    good = 1
    n = 0
    while n < turns:
        mbarrier.wait(full.index(slot), phase)
        q = q_ring.index(slot)
        k = k_ring.index(slot)
        g = g_ring.index(slot)
        logs = clamped(g.load(by_row).to(gl.float32)) * LOG2_E  # [C, K]
        logs = gl.convert_layout(gl.reshape(logs, [2, HALF, K]), by_half)
        whole = gl.sum(logs, 1)  # [2, K]
        c = gl.associative_scan(logs, 1, add) - gl.where(is_first, whole[:, None, :], 0.0)
        if done is not None:
            # As `weak_axis` needs it, too: from the middle of all that the chunk decays, `lean` away from that of its rows.
            halves = whole[:, None, :]  # [2, 1, K]
            lean = 0.5 * gl.sum(gl.where(is_first, halves, -halves), 0)[None, :, :]
            high = gl.max(c, 1)[:, None, :]
            low = gl.min(c, 1)[:, None, :]
            reach = gl.maximum(gl.maximum(gl.abs(high), gl.abs(low)), gl.maximum(gl.abs(high + lean), gl.abs(low + lean)))
            reach = gl.max(gl.max(gl.max(reach, 2), 1), 0)
        c = gl.convert_layout(gl.reshape(c, [C, K]), by_row)
        decay_ring.index(slot).store(gl.reshape(exp2(whole), [2 * K]))
        if done is not None:
            left = reach > LIMIT * (0.5 * LOG2_E)
            verdicts.index(slot).store(gl.full([1], left.to(gl.int32), gl.int32, gl.BlockedLayout([1], [32], [WARPS], [0])))
        if ADJOINT:
            _store_split(q.load(by_row).to(gl.float32) * exp2(-c), q, g)
            _store_split(k.load(by_row).to(gl.float32) * (exp2(c) * scale), k, k_low)
        else:
            _store_split(q.load(by_row).to(gl.float32) * exp2(c), q, g)
            _store_split(k.load(by_row).to(gl.float32) * exp2(-c), k, k_low)
        fence_async_shared()
        warpgroup_barrier()
        A = warpgroup_mma(q, k.permute((1, 0)), gl.zeros([C, C], gl.float32, layout), use_acc=False, is_async=True)  # [C, C]
        A = warpgroup_mma(g, k.permute((1, 0)), A, is_async=True)
        A = warpgroup_mma(q, k_low.permute((1, 0)), A, is_async=True)
        mbarrier.wait(taken.index(place), turn)
        A = gl.where(seen, warpgroup_mma_wait(0, deps=[A]), 0.0)
        if SPLIT:
            _store_split(A, score_ring.index(place), g.slice(0, C, 1))
        else:
            score_ring.index(place).store(A.to(gl.bfloat16))
        fence_async_shared()
        warpgroup_barrier()
        mbarrier.arrive(ready.index(place), count=1)
        mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = next_slot(slot, phase, STAGES)
        place, turn = next_slot(place, turn, SCORES)
        n += 1
        if done is not None:
            if left:
                turns = 0
                good = 0
    if done is not None:
        r = gl.arange(0, 128, gl.BlockedLayout([1], [32], [WARPS], [0]))
        for i in range(0, count, 128):
            gl.store(done + (first + i + r).to(gl.int64) * H + head, good + gl.zeros_like(r), mask=i + r < count)


@gluon.jit
def _state_at_start(
    begin, ends, end_decay, segment, head, col, ADJOINT: gl.constexpr, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """[K, TILE]: as `segments.state_at_start`, of a decay per key channel."""
    g, _first, _count, seq, place, total = segment
    i = gl.arange(0, K, gl.SliceLayout(1, layout))
    j = col + gl.arange(0, TILE, gl.SliceLayout(0, layout))[None, :]
    at = i[:, None] * V + j
    S = gl.zeros([K, TILE], gl.float32, layout)
    if begin is not None:
        S += gl.load(begin + (seq.to(gl.int64) * H + head) * (K * V) + at).to(gl.float32)
    if ends is not None:
        scanned_before = place
        if ADJOINT:
            scanned_before = total - 1 - place
        for n in range(scanned_before):
            other = (g - place + n).to(gl.int64) * H + head
            if ADJOINT:
                other = (g - place + total - 1 - n).to(gl.int64) * H + head
            S = S * gl.load(end_decay + other * K + i)[:, None] + gl.load(ends + other * (K * V) + at)
    return S


@gluon.jit
def scan_values(
    begin, ends, end_decay, o, final, states, rings, barriers, segment, token0, rows_left, scale, head,
    PART: gl.constexpr, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, SIGN: gl.constexpr,
    EVEN: gl.constexpr, ADJOINT: gl.constexpr, CHECKED: gl.constexpr, STAGES: gl.constexpr, SCORES: gl.constexpr,
    SPLIT: gl.constexpr,
):  # fmt: skip
    """The value channels from PART * TILE on."""
    q_ring, k_ring, v_ring, g_ring, _low, decay_ring, score_ring, state_ring, verdicts = rings
    full, empty, ready, taken = barriers
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, TILE, 16])
    rows_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    BEFORE: gl.constexpr = 1 if ADJOINT else 0
    AFTER: gl.constexpr = 1 - BEFORE
    _g, first, count, seq, _place, _total = segment
    col = PART * TILE
    S = _state_at_start(begin, ends, end_decay, segment, head, col, ADJOINT, H, K, V, layout)
    low = state_ring.index(PART)  # in bfloat16, a right operand
    slot = 0
    phase = 0
    place = 0
    turn = 0
    turns = count
    n = 0
    while n < turns:
        s, token, rows = chunk_in_turn(first, count, token0, rows_left, n, ADJOINT, C, SIGN)
        if states is not None:
            low.store(S.to(gl.bfloat16))
            warpgroup_barrier()
            i = gl.arange(0, K, gl.SliceLayout(1, rows_layout))[:, None]
            j = col + gl.arange(0, TILE, gl.SliceLayout(0, rows_layout))[None, :]
            gl.store(states + (s.to(gl.int64) * H + head) * (K * V) + (i * V + j), low.load(rows_layout))
        mbarrier.wait(full.index(slot), phase)
        mbarrier.wait(ready.index(place), turn)
        if CHECKED:
            if _left(verdicts.index(slot)):
                turns = 0
        v = v_ring.index(slot * (V // TILE) + PART)
        decays = decay_ring.index(slot)
        S *= decays.slice(BEFORE * K, K).load(gl.SliceLayout(1, layout))[:, None]
        low.store(S.to(gl.bfloat16))
        fence_async_shared()
        warpgroup_barrier()
        bo = warpgroup_mma(
            q_ring.index(slot), low, gl.zeros([C, TILE], gl.float32, layout), use_acc=False, is_async=True
        )  # [C, TILE]
        bo = warpgroup_mma(score_ring.index(place), v, bo, is_async=True)
        if SPLIT:
            bo = warpgroup_mma(g_ring.index(slot).slice(0, C, 1), v, bo, is_async=True)
        S = warpgroup_mma(k_ring.index(slot).permute((1, 0)), v, S, is_async=True)  # [K, TILE]
        bo = warpgroup_mma_wait(1, deps=[bo])
        if not ADJOINT:
            bo *= scale
        after = decays.slice(AFTER * K, K).load(gl.SliceLayout(1, layout))[:, None]
        S = warpgroup_mma_wait(0, deps=[S])
        warpgroup_barrier()
        mbarrier.arrive(empty.index(slot), count=1)
        mbarrier.arrive(taken.index(place), count=1)
        S *= after
        store_tile(o, bo, token, rows, head, col, H, V, C, SIGN, EVEN)
        slot, phase = next_slot(slot, phase, STAGES)
        place, turn = next_slot(place, turn, SCORES)
        n += 1
    if ends_sequence(segment, ADJOINT):  # where the segment was left, `scan_rows` writes over it
        i = gl.arange(0, K, gl.SliceLayout(1, layout))[:, None]
        j = col + gl.arange(0, TILE, gl.SliceLayout(0, layout))[None, :]
        gl.store(final + (seq.to(gl.int64) * H + head) * (K * V) + (i * V + j), S)


@gluon.jit
def key_gate_scan_by_warpgroups(
    q, k, v, g, begin, ends, end_decay, chunks, segments, done_before, scale, T, NT, NS, SC,
    o, final, states, done,
    H: gl.constexpr, HQ: gl.constexpr, HK: gl.constexpr, HV: gl.constexpr, HG: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, C: gl.constexpr, SIGN: gl.constexpr, EVEN: gl.constexpr, ADJOINT: gl.constexpr, LIMIT: gl.constexpr,
    STAGES: gl.constexpr, SCORES: gl.constexpr, SPLIT: gl.constexpr, COPY_REGISTERS: gl.constexpr,
    SCORE_REGISTERS: gl.constexpr, VALUE_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Programs: segments * heads. Arguments as of `head_gate_scan`; K and V are 64 or 128, g [tokens, HG, K] in bfloat16.

    done [chunks, H]: 1 for the chunks of a segment that was scanned to its end, else 0. done_before: that of another pass over
    the same segments, whose word is taken; then done is None.
    STAGES, SCORES: slots of chunks and of scores. SPLIT: scores are high and low part of bfloat16.
    REGISTERS: of a thread of each kind of warpgroup; the first of `scan_values` has the rest.
    """
    TV: gl.constexpr = V // TILE
    CHECKED: gl.constexpr = done is not None
    _tile, head, unit = program_at(1, H)
    segment, idle = scanned_segment(segments, unit, NT, NS, SC, ADJOINT, False)
    if idle:
        return
    _g, first, count, _seq, _place, _total = segment
    if done_before is not None:
        if count > 0:
            if gl.load(done_before + first.to(gl.int64) * H + head) == 0:
                return
    token0, rows_left = rows_of_segment(chunks, first, count, T, NT, C, SIGN)
    wide: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], gl.bfloat16)
    narrow: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, TILE], gl.bfloat16)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    q_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], wide)
    k_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], wide)
    v_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES * TV, C, TILE], narrow)
    g_ring = gl.allocate_shared_memory(gl.bfloat16, [STAGES, C, K], wide)  # then the low part of q~, then of the scores
    k_low = gl.allocate_shared_memory(gl.bfloat16, [C, K], wide)
    decay_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 2 * K], flat)
    score_ring = gl.allocate_shared_memory(gl.bfloat16, [SCORES, C, C], narrow)
    state_ring = gl.allocate_shared_memory(gl.bfloat16, [TV, K, TILE], narrow)
    verdicts = gl.allocate_shared_memory(gl.int32, [STAGES, 1], flat)
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
    rings = (q_ring, k_ring, v_ring, g_ring, k_low, decay_ring, score_ring, state_ring, verdicts)
    barriers = (full, empty, ready, taken)
    if TV == 2:
        gl.warp_specialize(
            [
                (scan_values, (
                    begin, ends, end_decay, o, final, states, rings, barriers, segment, token0, rows_left, scale, head, 0, H, K,
                    V, C, SIGN, EVEN, ADJOINT, CHECKED, STAGES, SCORES, SPLIT,
                )),
                (scan_values, (
                    begin, ends, end_decay, o, final, states, rings, barriers, segment, token0, rows_left, scale, head, 1, H, K,
                    V, C, SIGN, EVEN, ADJOINT, CHECKED, STAGES, SCORES, SPLIT,
                )),
                (make_scores, (
                    done, rings, barriers, segment, head, scale, H, K, C, ADJOINT, LIMIT, STAGES, SCORES, SPLIT,
                )),
                (copy_chunks, (
                    q, k, v, g, rings, barriers, segment, token0, rows_left, head, H, HQ, HK, HV, HG, K, V, C, SIGN, EVEN,
                    ADJOINT, CHECKED, STAGES,
                )),
            ],
            [WARPS, WARPS, WARPS],
            [VALUE_REGISTERS, SCORE_REGISTERS, COPY_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (scan_values, (
                    begin, ends, end_decay, o, final, states, rings, barriers, segment, token0, rows_left, scale, head, 0, H, K,
                    V, C, SIGN, EVEN, ADJOINT, CHECKED, STAGES, SCORES, SPLIT,
                )),
                (make_scores, (
                    done, rings, barriers, segment, head, scale, H, K, C, ADJOINT, LIMIT, STAGES, SCORES, SPLIT,
                )),
                (copy_chunks, (
                    q, k, v, g, rings, barriers, segment, token0, rows_left, head, H, HQ, HK, HV, HG, K, V, C, SIGN, EVEN,
                    ADJOINT, CHECKED, STAGES,
                )),
            ],
            [WARPS, WARPS],
            [SCORE_REGISTERS, COPY_REGISTERS],
        )  # fmt: skip
