"""The scans of the delta rule for Hopper, by warpgroups that do different things at one time (bfloat16, chunks of 64).

    forward:  R = v - kP S;           E = R - Z (beta R);     U = beta E;    o = qP S + N U;    S' = D S + ks^T U
    adjoint:  R = N^T do + ks dS;    dU = R - Z^T (beta R);  dv = beta dU;                     dS' = D dS + qP^T do - kP^T dv

with the letters of `scans`. A program scans all value channels of a segment of one head, so query and key are read once. Its
warpgroups hand chunks on through a ring of slots in shared memory:

    copy_chunks     fills slots with the rows of chunks to come, and makes N of the chunk before from its queries and keys
    scan_values     one warpgroup for each 64 value channels, with their part of the state in registers

Values, states and all between them are transposed, [value channels, rows or key channels]: each result is the left operand
of the next product, which the tensor cores take from registers. So nothing on the way from one state to the next passes
through shared memory; only what is written to memory is turned over there, off that way.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from ejkernel.kernels._triton.gated_delta_rule.kernels.chunks_by_warpgroups import (
    barriers_of,
    copy_chunks,
    decays_after,
    decays_upto,
    ring_of_tiles,
    rings_of_keys,
    rings_of_queries,
)
from ejkernel.kernels._triton.linear.kernels.segments import (
    chunk_in_turn,
    ends_sequence,
    rows_of_segment,
    scanned_segment,
    starts_sequence,
)
from ejkernel.kernels._triton.linear.kernels.tiles import program_at
from ejkernel.kernels._triton.linear.kernels.warpgroups import (
    TILE,
    WARPS,
    exp_of_log,
    next_slot,
    store_turned,
    warpgroup_barrier,
)


@gluon.jit
def _store_state(states, S, staging, index, col, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr):
    """Writes S [TILE, K] to value channels from `col` on of state `index` of states [states, K, V]."""
    if K == C:
        store_turned(states, S, staging, index * K, K, 0, col, 1, V, C, 1, True)
    else:
        low, high = gl.split(S.reshape([TILE, 2, C]).permute((0, 2, 1)))
        store_turned(states, low, staging, index * K, K, 0, col, 1, V, C, 1, True)
        warpgroup_barrier()
        store_turned(states, high, staging, index * K + C, K, 0, col, 1, V, C, 1, True)


@gluon.jit
def _tile_of_state(x, index, col, K: gl.constexpr, V: gl.constexpr, layout: gl.constexpr):
    """[TILE, K]: where value channels from `col` on of state `index` of x [states, K, V] lie."""
    i = col + gl.arange(0, TILE, gl.SliceLayout(1, layout))[:, None]
    j = gl.arange(0, K, gl.SliceLayout(0, layout))[None, :]
    return x + index * (K * V) + (i + j * V)


@gluon.jit
def _state_at_start(
    begin, starts, segment, head, col, ADJOINT: gl.constexpr, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    layout: gl.constexpr,
):  # fmt: skip
    """[TILE, K]: as in `scans`."""
    S = gl.zeros([TILE, K], gl.float32, layout)
    if begin is not None:
        S += gl.load(_tile_of_state(begin, segment[3].to(gl.int64) * H + head, col, K, V, layout)).to(gl.float32)
    if starts is not None:
        if not starts_sequence(segment, ADJOINT):
            S = gl.load(_tile_of_state(starts, segment[0].to(gl.int64) * H + head, col, K, V, layout))
    return S


@gluon.jit
def _decayed(S, logs, decay, RUNNING: gl.constexpr, ROWS: gl.constexpr, C: gl.constexpr, layout: gl.constexpr):
    """The state times the chunk's decay."""
    if ROWS:
        S = S * decay.load(gl.SliceLayout(0, layout))[None, :]
    elif RUNNING:
        S = S * exp_of_log(logs.slice(C - 1, 1).load(gl.SliceLayout(0, layout)))[None, :]
    return S


@gluon.jit
def scan_values(
    begin, starts, o, final, states, errors, query_rings, value_rings, key_rings, barriers, staging, segment, token0, rows_left,
    scale, head,
    PART: gl.constexpr, RUNNING: gl.constexpr, ROWS: gl.constexpr, SCORED: gl.constexpr, H: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, C: gl.constexpr, SIGN: gl.constexpr, EVEN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The value channels from PART * TILE on."""
    q_ring, score_ring = query_rings
    v_ring, _errors = value_rings
    k_ring, after_ring, z_ring, beta_ring, log_ring, decay_ring = key_rings
    full, empty, scored, _summed = barriers
    of_state: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, K, 16])
    of_rows: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, C, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, of_rows, 2)
    left_of_state: gl.constexpr = gl.DotOperandLayout(0, of_state, 2)
    _g, first, count, seq, _place, _total = segment
    col = PART * TILE
    S = _state_at_start(begin, starts, segment, head, col, False, H, K, V, of_state)
    zero = gl.zeros([TILE, C], gl.float32, of_rows)
    slot = 0
    phase = 0
    for n in range(count):
        s, token, rows = chunk_in_turn(first, count, token0, rows_left, n, False, C, SIGN)
        Sd = S.to(gl.bfloat16)
        read = gl.convert_layout(Sd, left)
        logs = log_ring.index(slot)
        mbarrier.wait(full.index(slot), phase)
        R = warpgroup_mma(read, k_ring.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)  # [TILE, C]
        bo = warpgroup_mma(read, q_ring.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        if states is not None:
            _store_state(states, Sd, staging.index(PART), s.to(gl.int64) * H + head, col, K, V, C)
        bb = beta_ring.index(slot).load(gl.SliceLayout(0, of_rows))[None, :]
        bv = v_ring.index(slot * (V // TILE) + PART).permute((1, 0)).load(of_rows)
        if RUNNING:
            upto = decays_upto(logs, of_rows)
        R, bo = warpgroup_mma_wait(0, deps=[R, bo])
        if RUNNING:
            R *= upto
            bo *= upto * scale
        elif not ROWS:
            bo *= scale
        R = bv.to(gl.float32) - R
        corrected = gl.convert_layout((R * bb).to(gl.bfloat16), left)
        X = warpgroup_mma(corrected, z_ring.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True)
        S = _decayed(S, logs, decay_ring.index(slot), RUNNING, ROWS, C, of_state)
        E = R - warpgroup_mma_wait(0, deps=[X])
        U = E * bb
        if not SCORED:
            mbarrier.wait(scored.index(slot), phase)
        written = gl.convert_layout(U.to(gl.bfloat16), left)
        bo = warpgroup_mma(written, score_ring.index(slot).permute((1, 0)), bo, is_async=True)
        if RUNNING:
            U *= decays_after(logs, C, of_rows)
        passed = gl.convert_layout(U.to(gl.bfloat16), left_of_state)
        S = warpgroup_mma(passed, after_ring.index(slot), S, is_async=True)  # [TILE, K]
        if errors is not None:
            store_turned(errors, E, staging.index(PART), token, rows, head, col, H, V, C, SIGN, EVEN)
        bo = warpgroup_mma_wait(1, deps=[bo])
        store_turned(o, bo, staging.index(PART), token, rows, head, col, H, V, C, SIGN, EVEN)
        S = warpgroup_mma_wait(0, deps=[S])
        warpgroup_barrier()
        mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = next_slot(slot, phase, STAGES)
    if ends_sequence(segment, False):
        gl.store(_tile_of_state(final, seq.to(gl.int64) * H + head, col, K, V, of_state), S)


@gluon.jit
def scan_values_back(
    begin, starts, dv, dbeta, final, states, query_rings, value_rings, key_rings, barriers, staging, sums, segment, token0,
    rows_left, scale, head,
    PART: gl.constexpr, RUNNING: gl.constexpr, ROWS: gl.constexpr, SCORED: gl.constexpr, H: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, C: gl.constexpr, SIGN: gl.constexpr, EVEN: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The value channels from PART * TILE on. sums [STAGES, C]: the second warpgroup's part of dbeta, which the first adds."""
    q_ring, score_ring = query_rings
    do_ring, error_ring = value_rings
    k_ring, after_ring, z_ring, beta_ring, log_ring, decay_ring = key_rings
    full, empty, scored, summed = barriers
    of_state: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, K, 16])
    of_rows: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, C, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, of_rows, 2)
    left_of_state: gl.constexpr = gl.DotOperandLayout(0, of_state, 2)
    ENDS_ONLY: gl.constexpr = dv is None
    TV: gl.constexpr = V // TILE
    g, first, count, seq, _place, _total = segment
    col = PART * TILE
    S = _state_at_start(begin, starts, segment, head, col, True, H, K, V, of_state)
    zero = gl.zeros([TILE, C], gl.float32, of_rows)
    slot = 0
    phase = 0
    for n in range(count):
        s, token, rows = chunk_in_turn(first, count, token0, rows_left, n, True, C, SIGN)
        Sd = S.to(gl.bfloat16)
        logs = log_ring.index(slot)
        mbarrier.wait(full.index(slot), phase)
        # Before products are on their way: the compiler waits for all of them where a former result is changed in between.
        S = _decayed(S, logs, decay_ring.index(slot), RUNNING, ROWS, C, of_state)
        d = do_ring.index(slot * TV + PART).permute((1, 0))  # [TILE, C]
        if not SCORED:
            mbarrier.wait(scored.index(slot), phase)
        own = warpgroup_mma(d, score_ring.index(slot), zero, use_acc=False, is_async=True)  # [TILE, C]
        R = warpgroup_mma(
            gl.convert_layout(Sd, left), after_ring.index(slot).permute((1, 0)), zero, use_acc=False, is_async=True
        )
        if not ENDS_ONLY:
            _store_state(states, Sd, staging.index(PART), s.to(gl.int64) * H + head, col, K, V, C)
        bb = beta_ring.index(slot).load(gl.SliceLayout(0, of_rows))[None, :]
        read = d.load(left_of_state)
        if RUNNING:
            read = (read.to(gl.float32) * (decays_upto(logs, left_of_state) * scale)).to(gl.bfloat16)
        elif not ROWS:
            read = (read.to(gl.float32) * scale).to(gl.bfloat16)
        S = warpgroup_mma(read, q_ring.index(slot), S, is_async=True)  # [TILE, K]
        own, R = warpgroup_mma_wait(1, deps=[own, R])
        if RUNNING:
            R *= decays_after(logs, C, of_rows)
        R += own
        corrected = gl.convert_layout((R * bb).to(gl.bfloat16), left)
        X = warpgroup_mma(corrected, z_ring.index(slot), zero, use_acc=False, is_async=True)
        X, S = warpgroup_mma_wait(0, deps=[X, S])
        dU = R - X
        dR = dU * bb
        negative = -dR
        if RUNNING:
            negative *= decays_upto(logs, of_rows)
        negative = gl.convert_layout(negative.to(gl.bfloat16), left_of_state)
        S = warpgroup_mma(negative, k_ring.index(slot), S, is_async=True)
        if not ENDS_ONLY:
            store_turned(dv, dR, staging.index(PART), token, rows, head, col, H, V, C, SIGN, EVEN)
            be = error_ring.index(slot * TV + PART).permute((1, 0)).load(of_rows)
            part = gl.sum(dU * be.to(gl.float32), 0)
            if PART == 1:
                sums.index(slot).store(part)
                warpgroup_barrier()
                mbarrier.arrive(summed.index(slot), count=1)
            else:
                one_each: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
                part = gl.convert_layout(part, one_each)
                if TV == 2:
                    mbarrier.wait(summed.index(slot), phase)
                    part += sums.index(slot).load(one_each)
                r = gl.arange(0, C, one_each)
                gl.store(dbeta + ((token + SIGN * r) * H + head), part.to(dbeta.dtype.element_ty), mask=r < rows)
        S = warpgroup_mma_wait(0, deps=[S])
        warpgroup_barrier()
        mbarrier.arrive(empty.index(slot), count=1)
        slot, phase = next_slot(slot, phase, STAGES)
    if ENDS_ONLY:
        gl.store(_tile_of_state(final, g.to(gl.int64) * H + head, col, K, V, of_state), S)
    elif ends_sequence(segment, True):
        gl.store(_tile_of_state(final, seq.to(gl.int64) * H + head, col, K, V, of_state), S)


@gluon.jit
def delta_scan_by_warpgroups(
    q, k, ks, N, chunk_decay, v, betas, gs, Z, begin, starts, chunks, segments, scale, T, NT, NS, SC,
    o, final, states, errors, scores,
    H: gl.constexpr, HK: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, SIGN: gl.constexpr,
    EVEN: gl.constexpr, STAGES: gl.constexpr, COPY_REGISTERS: gl.constexpr, VALUE_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Programs: segments * heads. Arguments as of `delta_scan`; K and V are 64 or 128, gs the running sums. Where N is
    None, it is made here, and kept in scores [chunks, H, C, C] if given.

    STAGES: slots of chunks. REGISTERS: of a thread of each kind of warpgroup; the first of `scan_values` has the rest.
    """
    ROWS: gl.constexpr = ks is not None
    RUNNING: gl.constexpr = gs is not None
    SCORED: gl.constexpr = N is not None
    TV: gl.constexpr = V // TILE
    _tile, head, unit = program_at(1, H)
    segment, idle = scanned_segment(segments, unit, NT, NS, SC, False, False)
    if idle:
        return
    _g, first, count, _seq, _place, _total = segment
    token0, rows_left = rows_of_segment(chunks, first, count, T, NT, C, SIGN)
    key_rings = rings_of_keys(ROWS, RUNNING, K, C, STAGES)
    query_rings = rings_of_queries(K, C, STAGES)
    v_ring = ring_of_tiles(STAGES * TV, C)
    value_rings = (v_ring, v_ring)
    staging = ring_of_tiles(TV, C)
    barriers = barriers_of(TV, STAGES)
    if TV == 2:
        gl.warp_specialize(
            [
                (scan_values, (
                    begin, starts, o, final, states, errors, query_rings, value_rings, key_rings, barriers, staging, segment,
                    token0, rows_left, scale, head, 0, RUNNING, ROWS, SCORED, H, K, V, C, SIGN, EVEN, STAGES,
                )),
                (scan_values, (
                    begin, starts, o, final, states, errors, query_rings, value_rings, key_rings, barriers, staging, segment,
                    token0, rows_left, scale, head, 1, RUNNING, ROWS, SCORED, H, K, V, C, SIGN, EVEN, STAGES,
                )),
                (copy_chunks, (
                    q, k, ks, N, chunk_decay, v, None, betas, gs, Z, scores, query_rings, value_rings, key_rings, barriers,
                    segment, token0, rows_left, scale, head, H, HK, K, V, C, SIGN, EVEN, False, STAGES,
                )),
            ],
            [WARPS, WARPS],
            [VALUE_REGISTERS, COPY_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (scan_values, (
                    begin, starts, o, final, states, errors, query_rings, value_rings, key_rings, barriers, staging, segment,
                    token0, rows_left, scale, head, 0, RUNNING, ROWS, SCORED, H, K, V, C, SIGN, EVEN, STAGES,
                )),
                (copy_chunks, (
                    q, k, ks, N, chunk_decay, v, None, betas, gs, Z, scores, query_rings, value_rings, key_rings, barriers,
                    segment, token0, rows_left, scale, head, H, HK, K, V, C, SIGN, EVEN, False, STAGES,
                )),
            ],
            [WARPS],
            [COPY_REGISTERS],
        )  # fmt: skip


@gluon.jit
def delta_adjoint_scan_by_warpgroups(
    q, k, ks, N, chunk_decay, do, betas, gs, Z, errors, begin, starts, chunks, segments, scale, T, NT, NS, SC,
    dv, dbeta, final, states,
    H: gl.constexpr, HK: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, SIGN: gl.constexpr,
    EVEN: gl.constexpr, STAGES: gl.constexpr, COPY_REGISTERS: gl.constexpr, VALUE_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Programs: segments * heads, back in time. Arguments as of `delta_adjoint_scan`, all else as of the forward scan.

    dbeta [tokens, H]: of all value channels.
    """
    ROWS: gl.constexpr = ks is not None
    RUNNING: gl.constexpr = gs is not None
    SCORED: gl.constexpr = N is not None
    TV: gl.constexpr = V // TILE
    _tile, head, unit = program_at(1, H)
    segment, idle = scanned_segment(segments, unit, NT, NS, SC, True, dv is None)
    if idle:
        return
    _g, first, count, _seq, _place, _total = segment
    token0, rows_left = rows_of_segment(chunks, first, count, T, NT, C, SIGN)
    key_rings = rings_of_keys(ROWS, RUNNING, K, C, STAGES)
    query_rings = rings_of_queries(K, C, STAGES)
    do_ring = ring_of_tiles(STAGES * TV, C)
    if errors is not None:
        value_rings = (do_ring, ring_of_tiles(STAGES * TV, C))
    else:
        value_rings = (do_ring, do_ring)
    staging = ring_of_tiles(TV, C)
    sums = gl.allocate_shared_memory(gl.float32, [STAGES, C], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    barriers = barriers_of(TV, STAGES)
    if TV == 2:
        gl.warp_specialize(
            [
                (scan_values_back, (
                    begin, starts, dv, dbeta, final, states, query_rings, value_rings, key_rings, barriers, staging, sums,
                    segment, token0, rows_left, scale, head, 0, RUNNING, ROWS, SCORED, H, K, V, C, SIGN, EVEN, STAGES,
                )),
                (scan_values_back, (
                    begin, starts, dv, dbeta, final, states, query_rings, value_rings, key_rings, barriers, staging, sums,
                    segment, token0, rows_left, scale, head, 1, RUNNING, ROWS, SCORED, H, K, V, C, SIGN, EVEN, STAGES,
                )),
                (copy_chunks, (
                    q, k, ks, N, chunk_decay, do, errors, betas, gs, Z, None, query_rings, value_rings, key_rings, barriers,
                    segment, token0, rows_left, scale, head, H, HK, K, V, C, SIGN, EVEN, True, STAGES,
                )),
            ],
            [WARPS, WARPS],
            [VALUE_REGISTERS, COPY_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (scan_values_back, (
                    begin, starts, dv, dbeta, final, states, query_rings, value_rings, key_rings, barriers, staging, sums,
                    segment, token0, rows_left, scale, head, 0, RUNNING, ROWS, SCORED, H, K, V, C, SIGN, EVEN, STAGES,
                )),
                (copy_chunks, (
                    q, k, ks, N, chunk_decay, do, errors, betas, gs, Z, None, query_rings, value_rings, key_rings, barriers,
                    segment, token0, rows_left, scale, head, H, HK, K, V, C, SIGN, EVEN, True, STAGES,
                )),
            ],
            [WARPS],
            [COPY_REGISTERS],
        )  # fmt: skip
