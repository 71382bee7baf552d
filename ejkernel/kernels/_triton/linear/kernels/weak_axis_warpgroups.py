"""`weak_axis` for Hopper: the key channels' gradients in weakly gated chunks, from q, k, v, do and g; bfloat16, whole tiles.

With c the running sum of log decays less its half at the chunk's end, `half` = exp of that half, S the state before the chunk
and dS the adjoint after it, fq = q exp(c), fk = k exp(-c) and M = scale tril(do v^T):

    aq = scale half (do S^T) + M fk        dq = exp(c) aq
    ak = half (v dS^T) + M^T fq            dk = exp(-c) ak
    dg = sum over rows >= t of (q dq - k dk)  +  half^2 sum(S dS)  +  half sum(fk (v dS^T))

All is transposed, [key channels, rows]: fk, fq and q dq - k dk are left operands, which the tensor cores take from registers.
So only M passes through shared memory, and gradients on their way out. c and the sums over rows are products with matrices of
0, 1 and 1/2; sum(S dS) is the diagonal of S dS^T.

A program takes every so manyth chunk of all heads. Its warpgroups hand them on through rings of slots in shared memory:

    copy_chunks      fills slots: of keys with g, k, q, and of values with do, v, S, dS
    make_scores      M, as high and low part, into a ring of its own
    make_gradients   two warpgroups: one for each 64 key channels, or, of 64 key channels, for every other chunk

A slot of values is free again after the first products of a chunk; one of keys when the gradients that took the place of q, k
and g are written. Barriers: `full` and `empty` of each kind of slot; of a slot of scores `ready` and `taken`.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from ejkernel.kernels._triton.linear.kernels.tiles import chunk_at
from ejkernel.kernels._triton.linear.kernels.warpgroups import (
    LOG2_E,
    TILE,
    WARPS,
    barriers_of,
    copy_rows,
    exp2,
    next_slot,
    split_bfloat16,
    store_turned,
    tiles,
    warpgroup_barrier,
)


@gluon.jit
def chunk_of(i, COUNT, weak, chunks, T, NT, H: gl.constexpr, C: gl.constexpr, SIGN: gl.constexpr):
    """(token of row 0, rows, 1 if it is computed here, else 0) of chunk i // H in head i % H; asked for a turn ahead."""
    at = gl.minimum(i, COUNT - 1)
    token, rows, _seq = chunk_at(chunks, at // H, T, NT, C, SIGN)
    return token, rows, gl.where(rows > 0, gl.load(weak + at), 0)


@gluon.jit
def following(slot, phase, wanted, SLOTS: gl.constexpr):
    """`next_slot` after a chunk that was wanted. The compiler must not know that a single slot stays the same: it would keep
    all addresses that follow from it, and spill them."""
    if SLOTS == 1:
        return wanted >> 1, phase ^ 1  # wanted is 1
    else:
        return next_slot(slot, phase, SLOTS)


@gluon.jit
def copy_chunks(
    q, k, g, do, v, starts, ends, weak, chunks, rings, barriers, start, step, COUNT, T, NT,
    H: gl.constexpr, HQ: gl.constexpr, HK: gl.constexpr, HG: gl.constexpr, HV: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, C: gl.constexpr, SIGN: gl.constexpr, EVEN: gl.constexpr, KEYS: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    TK: gl.constexpr = K // TILE
    TV: gl.constexpr = V // TILE
    key_rings, value_rings, _scores, _sums = rings
    q_ring, k_ring, g_ring = key_rings
    do_ring, v_ring, S_ring, dS_ring = value_rings
    keys_full, keys_empty, values_full, states_full, values_empty, _ready, _taken = barriers
    key_slot = 0
    key_phase = 1  # the first wait for a slot finds it empty
    slot = 0
    phase = 1
    token, rows, wanted = chunk_of(start, COUNT, weak, chunks, T, NT, H, C, SIGN)
    for i in range(start, COUNT, step):
        next_token, next_rows, next_wanted = chunk_of(i + step, COUNT, weak, chunks, T, NT, H, C, SIGN)
        if wanted != 0:
            head = i % H
            mbarrier.wait(keys_empty.index(key_slot), key_phase)
            for n in gl.static_range(TK):
                part = key_slot * TK + n
                copy_rows(g, g_ring.index(part), token, rows, head // (H // HG), n * TILE, HG, K, C, TILE, SIGN, EVEN)
                copy_rows(k, k_ring.index(part), token, rows, head // (H // HK), n * TILE, HK, K, C, TILE, SIGN, EVEN)
                copy_rows(q, q_ring.index(part), token, rows, head // (H // HQ), n * TILE, HQ, K, C, TILE, SIGN, EVEN)
            async_copy.mbarrier_arrive(keys_full.index(key_slot), increment_count=False)
            mbarrier.wait(values_empty.index(slot), phase)
            for m in gl.static_range(TV):
                part = slot * TV + m
                copy_rows(do, do_ring.index(part), token, rows, head, m * TILE, H, V, C, TILE, SIGN, EVEN)
                copy_rows(v, v_ring.index(part), token, rows, head // (H // HV), m * TILE, HV, V, C, TILE, SIGN, EVEN)
            async_copy.mbarrier_arrive(values_full.index(slot), increment_count=False)
            for n in gl.static_range(TK):
                row = gl.cast(i, gl.int64) * K + n * TILE
                for m in gl.static_range(TV):
                    part = (slot * TK + n) * TV + m
                    copy_rows(starts, S_ring.index(part), row, TILE, 0, m * TILE, 1, V, TILE, TILE, 1, True)
                    copy_rows(ends, dS_ring.index(part), row, TILE, 0, m * TILE, 1, V, TILE, TILE, 1, True)
            async_copy.mbarrier_arrive(states_full.index(slot), increment_count=False)
            key_slot, key_phase = following(key_slot, key_phase, wanted, KEYS)
            slot, phase = following(slot, phase, wanted, VALUES)
        token, rows, wanted = next_token, next_rows, next_wanted


@gluon.jit
def _product(a_ring, b_ring, a, b, TV: gl.constexpr, layout: gl.constexpr):
    """Begins a b^T of matrices [64, V]: TV tiles of a_ring from a on, of b_ring from b on."""
    acc = gl.zeros([TILE, TILE], gl.float32, layout)
    for m in gl.static_range(TV):
        acc = warpgroup_mma(a_ring.index(a + m), b_ring.index(b + m).permute((1, 0)), acc, use_acc=m > 0, is_async=True)
    return acc


@gluon.jit
def make_scores(
    weak, chunks, rings, barriers, start, step, scale, COUNT, T, NT,
    H: gl.constexpr, TV: gl.constexpr, C: gl.constexpr, SIGN: gl.constexpr, VALUES: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    _keys, value_rings, score_rings, _sums = rings
    do_ring, v_ring, _S, _dS = value_rings
    high_ring, low_ring = score_rings
    _keys_full, _keys_empty, values_full, _states_full, values_empty, ready, taken = barriers
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, C, 16])
    seen = gl.arange(0, C, gl.SliceLayout(1, layout))[:, None] >= gl.arange(0, C, gl.SliceLayout(0, layout))[None, :]
    slot = 0
    phase = 0
    place = 0
    turn = 1
    _token, _rows, wanted = chunk_of(start, COUNT, weak, chunks, T, NT, H, C, SIGN)
    for i in range(start, COUNT, step):
        _token, _rows, next_wanted = chunk_of(i + step, COUNT, weak, chunks, T, NT, H, C, SIGN)
        if wanted != 0:
            mbarrier.wait(values_full.index(slot), phase)
            M = _product(do_ring, v_ring, slot * TV, slot * TV, TV, layout)  # [C, C]
            M = warpgroup_mma_wait(0, deps=[M])
            warpgroup_barrier()
            mbarrier.arrive(values_empty.index(slot), count=1)
            high, low = split_bfloat16(gl.where(seen, M, 0.0) * scale)
            mbarrier.wait(taken.index(place), turn)
            high_ring.index(place).store(high)
            low_ring.index(place).store(low)
            fence_async_shared()
            warpgroup_barrier()
            mbarrier.arrive(ready.index(place), count=1)
            slot, phase = following(slot, phase, wanted, VALUES)
            place, turn = following(place, turn, wanted, SCORES)
        wanted = next_wanted


@gluon.jit
def gradients_of_tile(
    dq, dk, dg, q, k, g, M, M_low, ready, turn, taken, c, fk, aq, ak, everything, onwards, zero, scale, one, token, rows, head,
    col, H: gl.constexpr, K: gl.constexpr, C: gl.constexpr, SIGN: gl.constexpr, EVEN: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """dq (or None), dk and dg of the channels from `col` on: q, k and g hold theirs, and then the gradients on their way out.

    fk, aq, ak [TILE, C]: as in the formulas, aq and ak of the states alone. everything [TILE]: what dg has of a whole chunk.
    SCALED: M and aq have the scale already. one: 1, which the compiler does not know.
    """
    layout: gl.constexpr = c.type.layout
    left: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    high, low = split_bfloat16(fk)
    high = gl.convert_layout(high, left)
    low = gl.convert_layout(low, left)
    mbarrier.wait(ready, turn)
    aq = warpgroup_mma(high, M.permute((1, 0)), aq, is_async=True)
    aq = warpgroup_mma(low, M.permute((1, 0)), aq, is_async=True)
    aq = warpgroup_mma(high, M_low.permute((1, 0)), aq, is_async=True)
    fq = q.permute((1, 0)).load(layout).to(gl.float32) * exp2(c)
    if not SCALED:
        fq *= scale
    q_high, q_low = split_bfloat16(fq)
    q_high = gl.convert_layout(q_high, left)
    q_low = gl.convert_layout(q_low, left)
    ak = warpgroup_mma(q_high, M, ak, is_async=True)
    ak = warpgroup_mma(q_low, M, ak, is_async=True)
    ak = warpgroup_mma(q_high, M_low, ak, is_async=True)
    aq, high, low = warpgroup_mma_wait(3, deps=[aq, high, low])
    c *= one  # so exponentials are made again: there are no registers to keep them
    aq *= exp2(c)
    if not SCALED:
        aq *= scale
    difference = q.permute((1, 0)).load(layout).to(gl.float32) * aq
    if dq is not None:
        store_turned(dq, aq, q, token, rows, head, col, H, K, C, SIGN, EVEN)
    ak, q_high, q_low = warpgroup_mma_wait(0, deps=[ak, q_high, q_low])
    warpgroup_barrier()
    mbarrier.arrive(taken, count=1)
    ak *= exp2(-c)
    # A pair of rows counts at both, by products that differ by 2^-17: in sums over both that is all that is left of it.
    difference -= k.permute((1, 0)).load(layout).to(gl.float32) * ak
    high, low = split_bfloat16(difference)
    high = gl.convert_layout(high, left)
    low = gl.convert_layout(low, left)
    found = warpgroup_mma(high, onwards, zero, use_acc=False, is_async=True)
    found = warpgroup_mma(low, onwards, found, is_async=True)
    store_turned(dk, ak, k, token, rows, head, col, H, K, C, SIGN, EVEN)
    found, high, low = warpgroup_mma_wait(0, deps=[found, high, low])
    found += everything[:, None]
    store_turned(dg, found, g, token, rows, head, col, H, K, C, SIGN, EVEN)


@gluon.jit
def make_gradients(
    dq, dk, dg, weak, chunks, rings, barriers, start, step, scale, COUNT, T, NT,
    PART: gl.constexpr, H: gl.constexpr, K: gl.constexpr, V: gl.constexpr, C: gl.constexpr, SIGN: gl.constexpr,
    EVEN: gl.constexpr, KEYS: gl.constexpr, VALUES: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """The key channels from PART * TILE on; of one tile, all of them in every other chunk from PART on."""
    TK: gl.constexpr = K // TILE
    TV: gl.constexpr = V // TILE
    OWN: gl.constexpr = PART * (TK - 1)
    key_rings, value_rings, score_rings, sums = rings
    q_ring, k_ring, g_ring = key_rings
    do_ring, v_ring, S_ring, dS_ring = value_rings
    high_ring, low_ring = score_rings
    from_middle, onwards = sums
    keys_full, keys_empty, values_full, states_full, values_empty, ready, taken = barriers
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, C, 16])
    own = gl.arange(0, TILE, gl.SliceLayout(1, layout))[:, None]
    row = gl.arange(0, C, gl.SliceLayout(0, layout))[None, :]
    zero = gl.zeros([TILE, C], gl.float32, layout)
    key_slot = 0
    key_phase = 0
    slot = 0
    phase = 0
    place = 0
    turn = 0
    one = 1.0 + scale * 0.0  # which the compiler does not know
    others = PART * (2 - TK)  # chunks of the other warpgroup to come before the next one of this
    token, rows, wanted = chunk_of(start, COUNT, weak, chunks, T, NT, H, C, SIGN)
    for i in range(start, COUNT, step):
        next_token, next_rows, next_wanted = chunk_of(i + step, COUNT, weak, chunks, T, NT, H, C, SIGN)
        if wanted != 0:
            if others == 0:
                head = i % H
                q = q_ring.index(key_slot * TK + OWN)
                k = k_ring.index(key_slot * TK + OWN)
                g = g_ring.index(key_slot * TK + OWN)
                states = (slot * TK + OWN) * TV
                mbarrier.wait(keys_full.index(key_slot), key_phase)
                c = warpgroup_mma(g.permute((1, 0)), from_middle, zero, use_acc=False, is_async=True)  # [TILE, C]
                mbarrier.wait(values_full.index(slot), phase)
                mbarrier.wait(states_full.index(slot), phase)
                passed = _product(S_ring, dS_ring, states, states, TV, layout)  # [TILE, TILE]
                aq = _product(S_ring, do_ring, states, slot * TV, TV, layout)  # [TILE, C]
                ak = _product(dS_ring, v_ring, states, slot * TV, TV, layout)
                c, passed = warpgroup_mma_wait(2 * TV, deps=[c, passed])
                c *= LOG2_E
                half = exp2(gl.sum(gl.where(row == C - 1, c, 0.0), 1))  # [TILE]
                everything = gl.sum(gl.where(own == row, passed, 0.0), 1) * half * half
                fk = k.permute((1, 0)).load(layout).to(gl.float32) * exp2(-c)  # [TILE, C]
                aq, ak = warpgroup_mma_wait(0, deps=[aq, ak])
                warpgroup_barrier()
                mbarrier.arrive(values_empty.index(slot), count=1)
                aq *= (half * scale)[:, None]
                ak *= half[:, None]
                everything += gl.sum(fk * ak, 1)
                gradients_of_tile(
                    dq, dk, dg, q, k, g, high_ring.index(place), low_ring.index(place), ready.index(place), turn,
                    taken.index(place), c, fk, aq, ak, everything, onwards, zero, scale, one, token, rows, head, OWN * TILE, H,
                    K, C, SIGN, EVEN, True,
                )  # fmt: skip
                warpgroup_barrier()
                mbarrier.arrive(keys_empty.index(key_slot), count=1)
            if TK == 1:
                others = 1 - others
            key_slot, key_phase = following(key_slot, key_phase, wanted, KEYS)
            slot, phase = following(slot, phase, wanted, VALUES)
            place, turn = following(place, turn, wanted, SCORES)
        token, rows, wanted = next_token, next_rows, next_wanted


@gluon.jit
def matrices(C: gl.constexpr):
    """Two [C, C]: half of what is before and at a row less half of what is after, and all from a row on."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.bfloat16)
    s = gl.arange(0, C, gl.SliceLayout(1, layout))[:, None]
    t = gl.arange(0, C, gl.SliceLayout(0, layout))[None, :]
    from_middle = gl.allocate_shared_memory(gl.bfloat16, [C, C], shared, gl.where(s <= t, 0.5, -0.5).to(gl.bfloat16))
    onwards = gl.allocate_shared_memory(gl.bfloat16, [C, C], shared, gl.where(s >= t, 1.0, 0.0).to(gl.bfloat16))
    fence_async_shared()
    return from_middle, onwards


@gluon.jit
def weak_axis_by_warpgroups(
    q, k, g, do, v, starts, ends, weak, chunks, scale, COUNT, T, NT,
    dx, dy, dg,
    H: gl.constexpr, HQ: gl.constexpr, HK: gl.constexpr, HG: gl.constexpr, HV: gl.constexpr, K: gl.constexpr,
    V: gl.constexpr, C: gl.constexpr, SIGN: gl.constexpr, EVEN: gl.constexpr, KEYS: gl.constexpr, VALUES: gl.constexpr,
    SCORES: gl.constexpr, COPY_REGISTERS: gl.constexpr, SCORE_REGISTERS: gl.constexpr, GRADIENT_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Programs: as many as fill the device; each takes every so manyth of COUNT = chunks * heads.

    starts, ends [chunks, H, K, V]: state before and adjoint after each chunk. weak [chunks, H]: 0 where nothing is to be done.
    dx, dy, dg: gradients of q, k and g, per query head.
    KEYS, VALUES, SCORES: slots. REGISTERS: of a thread of each kind of warpgroup; the first of `make_gradients` has the rest.
    """
    TK: gl.constexpr = K // TILE
    start = gl.program_id(0)
    step = gl.num_programs(0)
    TV: gl.constexpr = V // TILE
    key_rings = (tiles(KEYS * TK), tiles(KEYS * TK), tiles(KEYS * TK))
    value_rings = (tiles(VALUES * TV), tiles(VALUES * TV), tiles(VALUES * TK * TV), tiles(VALUES * TK * TV))
    score_rings = (tiles(SCORES), tiles(SCORES))
    rings = (key_rings, value_rings, score_rings, matrices(C))
    barriers = (
        barriers_of(KEYS, 32 * WARPS), barriers_of(KEYS, TK), barriers_of(VALUES, 32 * WARPS), barriers_of(VALUES, 32 * WARPS),
        barriers_of(VALUES, TK + 1), barriers_of(SCORES, 1), barriers_of(SCORES, TK),
    )  # fmt: skip
    gl.warp_specialize(
        [
            (make_gradients, (
                dx, dy, dg, weak, chunks, rings, barriers, start, step, scale, COUNT, T, NT, 0, H, K, V, C, SIGN, EVEN, KEYS,
                VALUES, SCORES,
            )),
            (make_gradients, (
                dx, dy, dg, weak, chunks, rings, barriers, start, step, scale, COUNT, T, NT, 1, H, K, V, C, SIGN, EVEN, KEYS,
                VALUES, SCORES,
            )),
            (make_scores, (
                weak, chunks, rings, barriers, start, step, scale, COUNT, T, NT, H, V // TILE, C, SIGN, VALUES, SCORES,
            )),
            (copy_chunks, (
                q, k, g, do, v, starts, ends, weak, chunks, rings, barriers, start, step, COUNT, T, NT, H, HQ, HK, HG, HV, K, V,
                C, SIGN, EVEN, KEYS, VALUES,
            )),
        ],
        [WARPS, WARPS, WARPS],
        [GRADIENT_REGISTERS, SCORE_REGISTERS, COPY_REGISTERS],
    )  # fmt: skip
