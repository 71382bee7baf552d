"""Gluon kernels, interpreted: what they compute, and that a synchronisation that is missing is an error with its name."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")
gluon = pytest.importorskip("triton.experimental.gluon", reason="this Triton has no Gluon")
import triton  # noqa: E402
from triton.experimental.gluon import language as gl  # noqa: E402
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2  # noqa: E402
from triton.experimental.gluon.language.nvidia.hopper import (  # noqa: E402
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ejkernel.callib import triton_call  # noqa: E402

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="kernels are compiled here")

copy_async = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
partition_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
C = 64
SLOTS = 2
WORDS = {  # each of them left out, and what is said of it
    "WAIT_EMPTY": r"a copy by .*copy_chunks\) writes bfloat16\[2, 64, 64\]\[0\] and does not wait",
    "COPIES_ARRIVE": r"nobody can go on: .*add_up\) waits for a barrier\[0\], parity 0",
    "WAIT_FULL": r"add_up\) reads bfloat16\[2, 64, 64\]\[0\] before anything is written there",
    "FENCE": r"multiplies .* stored by .* without fence_async_shared",
    "MEET": r"arrives at .* by one thread while others may still read or write",
    "WAIT_PRODUCT": r"uses the result of a product that it has not waited for",
    "IN_ORDER": r"writes .* while a product that reads it is under way",
    "EMPTY_ARRIVES": r"nobody can go on: .*copy_chunks\) waits for a barrier",
}


@gluon.jit
def copy_chunks(x, ring, full, empty, n, WAIT_EMPTY: gl.constexpr, COPIES_ARRIVE: gl.constexpr, SLOTS: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    r = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    c = gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    for i in range(n):
        slot = i % SLOTS
        if WAIT_EMPTY:
            mbarrier.wait(empty.index(slot), 1 - (i // SLOTS) % 2)
        copy_async(ring.index(slot), x + i * 4096 + r * 64 + c)
        if COPIES_ARRIVE:
            async_copy.mbarrier_arrive(full.index(slot), increment_count=False)


@gluon.jit
def add_up(
    out, ring, low, full, empty, n, WAIT_FULL: gl.constexpr, FENCE: gl.constexpr, MEET: gl.constexpr,
    WAIT_PRODUCT: gl.constexpr, IN_ORDER: gl.constexpr, EMPTY_ARRIVES: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    S = gl.zeros([64, 64], gl.float32, layout)
    for i in range(n):
        slot = i % SLOTS
        if WAIT_FULL:
            mbarrier.wait(full.index(slot), (i // SLOTS) % 2)
        x = ring.index(slot)
        low.index(0).store((x.load(layout).to(gl.float32) * 2).to(gl.bfloat16))
        if FENCE:
            fence_async_shared()
        partition_barrier()
        S = warpgroup_mma(low.index(0), x, S, is_async=True)
        if not IN_ORDER:
            low.index(0).store(gl.zeros([64, 64], gl.bfloat16, layout))
        if WAIT_PRODUCT:
            S = warpgroup_mma_wait(0, deps=[S])
        if MEET:
            partition_barrier()
        if EMPTY_ARRIVES:
            mbarrier.arrive(empty.index(slot), count=1)
    r = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    c = gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :]
    gl.store(out + r * 64 + c, S)


@gluon.jit
def sum_of_squares(
    x, n, out,
    WAIT_EMPTY: gl.constexpr, COPIES_ARRIVE: gl.constexpr, WAIT_FULL: gl.constexpr, FENCE: gl.constexpr, MEET: gl.constexpr,
    WAIT_PRODUCT: gl.constexpr, IN_ORDER: gl.constexpr, EMPTY_ARRIVES: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
    ring = gl.allocate_shared_memory(gl.bfloat16, [SLOTS, 64, 64], shared)
    low = gl.allocate_shared_memory(gl.bfloat16, [1, 64, 64], shared)
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(full.index(i), count=128)
        mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize(
        [
            (add_up, (out, ring, low, full, empty, n, WAIT_FULL, FENCE, MEET, WAIT_PRODUCT, IN_ORDER, EMPTY_ARRIVES, SLOTS)),
            (copy_chunks, (x, ring, full, empty, n, WAIT_EMPTY, COPIES_ARRIVE, SLOTS)),
        ],
        [4],
        [40],
    )


def squares(x, n=None, **left_out):
    words = dict.fromkeys(WORDS, True) | left_out
    out = jax.ShapeDtypeStruct((C, C), jnp.float32)
    return triton_call(x, len(x) if n is None else n, kernel=sum_of_squares, out_shape=out, grid=1, SLOTS=SLOTS, **words)


@pytest.fixture(scope="module")
def chunks():
    return jax.random.normal(jax.random.key(0), (5, C, C)).astype(jnp.bfloat16)


@pytest.mark.parametrize("n", [0, 1, 2, 5])
def test_values(chunks, n):
    x = np.asarray(chunks, np.float64)[:n]
    np.testing.assert_allclose(squares(chunks, n), (2 * x @ x).sum(0), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("word", WORDS)
def test_what_is_left_out_is_named(chunks, word):
    with pytest.raises(jax.errors.JaxRuntimeError, match=WORDS[word]):
        jax.block_until_ready(squares(chunks, n=1 if word == "WAIT_PRODUCT" else 5, **{word: False}))


def test_out_of_bounds(chunks):
    with pytest.raises(jax.errors.JaxRuntimeError, match="reads element 20480 of 'x', which has 20480"):
        jax.block_until_ready(squares(chunks, n=6))


@gluon.jit
def copies_alone(x, out, WAITED: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    memory = gl.allocate_shared_memory(gl.float32, [1, 128], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    i = gl.arange(0, 128, layout)
    copy_async(memory.index(0), x + i, mask=i < 100)
    async_copy.commit_group()
    if WAITED:
        async_copy.wait_group(0)
        gl.store(out + i, memory.index(0).load(layout))


def test_copies_outlive_no_program():
    x = jnp.arange(128.0)
    call = lambda waited: triton_call(x, kernel=copies_alone, out_shape=x, grid=1, WAITED=waited)
    np.testing.assert_array_equal(call(True), jnp.where(x < 100, x, 0))
    with pytest.raises(jax.errors.JaxRuntimeError, match="under way when the program ends"):
        jax.block_until_ready(call(False))


@gluon.jit
def arithmetic(x, i, out, ints, D: gl.constexpr):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    r = gl.arange(0, D, layout)
    v = gl.load(x + r).to(gl.float32)
    first, last = gl.associative_scan((v, v), 0, _both)
    gl.store(out + r, gl.where(r % 2 == 0, first, last))
    gl.store(ints + 0, (i - 8) // 3)
    gl.store(ints + 1, (i - 8) % 3)
    gl.store(ints + 2, gl.sum((v > 0).to(gl.int32), 0))
    gl.store(ints + 3, gl.num_programs(0) * 10 + gl.program_id(0))


@gluon.jit
def _both(a, b, c, d):
    return a + c, gl.maximum(b, d)


def test_numbers_are_as_on_a_gpu():
    """Integers are divided towards 0; float32 is not widened; bfloat16 is rounded to nearest when it is stored."""
    x = jnp.asarray([0.1, -3.0, 2.5, 1.0]).astype(jnp.bfloat16)
    shapes = (jax.ShapeDtypeStruct((4,), jnp.bfloat16), jax.ShapeDtypeStruct((4,), jnp.int32))
    found, ints = triton_call(x, 1, kernel=arithmetic, out_shape=shapes, grid=1, D=4)
    v = np.asarray(x, np.float32)
    want = np.where(np.arange(4) % 2 == 0, np.cumsum(v), np.maximum.accumulate(v)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(found), want)
    np.testing.assert_array_equal(ints, [-2, -1, 3, 10])


@gluon.jit
def square_in_registers(x, out, PRECISION: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [1, 1], [16, 8])
    r = gl.arange(0, 16, gl.SliceLayout(1, layout))[:, None]
    c = gl.arange(0, 16, gl.SliceLayout(0, layout))[None, :]
    tile = gl.load(x + r * 16 + c)
    left = gl.convert_layout(tile, gl.DotOperandLayout(0, layout, 1))
    right = gl.convert_layout(tile, gl.DotOperandLayout(1, layout, 1))
    gl.store(out + r * 16 + c, mma_v2(left, right, tile, input_precision=PRECISION))


def test_products_of_registers_see_ten_bits_of_float32():
    """The others are cut off, not rounded; what is added to keeps all of its own."""
    x = jax.random.normal(jax.random.key(1), (16, 16))
    run = lambda precision: triton_call(x, kernel=square_in_registers, out_shape=x, grid=1, num_warps=1, PRECISION=precision)
    seen = np.trunc(np.asarray(x, np.float64) / (unit := 2.0 ** (np.floor(np.log2(np.abs(x))) - 10))) * unit
    np.testing.assert_allclose(run("tf32"), x + seen @ seen, rtol=1e-6, atol=1e-5)
    with pytest.raises(jax.errors.JaxRuntimeError, match="does not know mma_v2 with input_precision='ieee'"):
        jax.block_until_ready(run("ieee"))


@gluon.jit
def unknown(x, out):
    gl.store(out, gl.atomic_add(x, 1.0))


def test_what_is_not_known_is_said():
    x = jnp.ones(1)
    with pytest.raises(jax.errors.JaxRuntimeError, match=r"does not know gl\.atomic_add"):
        jax.block_until_ready(triton_call(x, kernel=unknown, out_shape=x, grid=1))
