"""What kernels for Hopper, written in Gluon, share: warpgroups that hand chunks on through rings of slots in shared memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ejkernel.kernels._triton.linear.kernels.tiles import INTERPRETED

# Triton 3.6 has the older names.
copy_async = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
warpgroup_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier

LOG2_E = gl.constexpr(1.4426950408889634)
WARPS = gl.constexpr(4)  # of every warpgroup
TILE = gl.constexpr(64)  # value channels of a warpgroup


@gluon.jit
def exp2(x):
    if INTERPRETED:
        return gl.exp2(x)
    else:
        return gl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def exp_of_log(x):
    return exp2(x * LOG2_E)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def next_slot(slot, phase, SLOTS: gl.constexpr):
    """The slot after this one, and the parity of the phase that its barriers are then in."""
    slot += 1
    if slot == SLOTS:
        slot = 0
        phase ^= 1
    return slot, phase


@gluon.jit
def tiles(SLOTS: gl.constexpr):
    """[SLOTS, TILE, TILE]; a chunk has as many rows."""
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([TILE, TILE], gl.bfloat16)
    return gl.allocate_shared_memory(gl.bfloat16, [SLOTS, TILE, TILE], layout)


@gluon.jit
def barriers_of(SLOTS: gl.constexpr, COUNT: gl.constexpr):
    """[SLOTS, 1]: a barrier for each slot, for so many arrivals."""
    found = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(found.index(i), count=COUNT)
    return found


@gluon.jit
def copy_rows(
    x, slot, token, rows, head, col, HEADS: gl.constexpr, D: gl.constexpr, C: gl.constexpr, BD: gl.constexpr,
    SIGN: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """Starts to copy columns from `col` on of a chunk's rows of x [tokens, HEADS, D] to slot [C, BD]; rows outside are 0."""
    LANES: gl.constexpr = BD // 8
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // LANES, LANES], [WARPS, 1], [1, 0])
    r = gl.arange(0, C, gl.SliceLayout(1, layout))[:, None]
    c = gl.arange(0, BD, gl.SliceLayout(0, layout))[None, :]
    at = x + (token * HEADS + head) * D + col + ((SIGN * HEADS * D) * r + c)
    if EVEN:
        copy_async(slot, at)
    else:
        copy_async(slot, at, mask=(r < rows) & (c < D))


@gluon.jit
def copy_tile(x, slot, row, col, D: gl.constexpr, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """Starts to copy [ROWS, COLUMNS] from (row, col) on of a matrix x [rows, D], of which all are there."""
    copy_rows(x, slot, row, ROWS, 0, col, 1, D, ROWS, COLUMNS, 1, True)


@gluon.jit
def copy_numbers(x, slot, index, N: gl.constexpr):
    """Starts to copy row `index` of x [rows, N] in float32."""
    copy_async(slot, x + index * N + gl.arange(0, N, gl.BlockedLayout([4], [32], [WARPS], [0])))


@gluon.jit
def store_tile(
    x, value, token, rows, head, col, HEADS: gl.constexpr, D: gl.constexpr, C: gl.constexpr, SIGN: gl.constexpr,
    EVEN: gl.constexpr,
):  # fmt: skip
    """Writes value [C, TILE] to a chunk's rows of x [tokens, HEADS, D], columns from `col` on; rows outside are left."""
    by_rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
    # Two neighbours of float32 are a sector already; of bfloat16 they are exchanged between threads first.
    layout: gl.constexpr = value.type.layout if x.dtype.element_ty == gl.float32 else by_rows
    found = gl.convert_layout(value.to(x.dtype.element_ty), layout)
    r = gl.arange(0, C, gl.SliceLayout(1, layout))[:, None]
    c = col + gl.arange(0, TILE, gl.SliceLayout(0, layout))[None, :]
    at = x + (token * HEADS + head) * D + ((SIGN * HEADS * D) * r + c)
    if EVEN:
        gl.store(at, found)
    else:
        gl.store(at, found, mask=(r < rows) & (c < D))


@gluon.jit
def store_turned(
    x, value, staging, token, rows, head, col, HEADS: gl.constexpr, D: gl.constexpr, C: gl.constexpr, SIGN: gl.constexpr,
    EVEN: gl.constexpr,
):  # fmt: skip
    """Writes value [TILE, C] to a chunk's rows of x [tokens, HEADS, D], columns from `col` on; rows outside are left.

    bfloat16 goes by way of staging [C, TILE]. Neighbours of float32 in a column are a sector already.
    """
    if x.dtype.element_ty == gl.float32:
        own: gl.constexpr = value.type.layout
        r = gl.arange(0, C, gl.SliceLayout(0, own))[None, :]
        c = gl.arange(0, TILE, gl.SliceLayout(1, own))[:, None]
        found = value
    else:
        by_rows: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [WARPS, 1], [1, 0])
        r = gl.arange(0, C, gl.SliceLayout(1, by_rows))[:, None]
        c = gl.arange(0, TILE, gl.SliceLayout(0, by_rows))[None, :]
        staging.permute((1, 0)).store(value.to(x.dtype.element_ty))
        warpgroup_barrier()
        found = staging.load(by_rows)
    at = x + (token * HEADS + head) * D + col + ((SIGN * HEADS * D) * r + c)
    if EVEN:
        gl.store(at, found)
    else:
        gl.store(at, found, mask=(r < rows) & (c < D))


@gluon.jit
def split_bfloat16(x):
    """bfloat16's high and low part of x, two at a time: left to the compiler, parts are taken out of registers and put back."""
    if INTERPRETED:
        high = x.to(gl.bfloat16)
        return high, (x - high.to(gl.float32)).to(gl.bfloat16)
    else:
        return gl.inline_asm_elementwise(
            """{
                .reg .b32 first, second;
                cvt.rn.bf16x2.f32 $0, $3, $2;
                shl.b32 first, $0, 16;
                and.b32 second, $0, 0xffff0000;
                sub.rn.f32 first, $2, first;
                sub.rn.f32 second, $3, second;
                cvt.rn.bf16x2.f32 $1, second, first;
            }""",
            "=&r,=r,f,f", [x], dtype=(gl.bfloat16, gl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip
