"""What the blockwise schedule promises beyond right results: blocks left out, memory linear in the length."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.kernels._attention import AttentionConfig, AttentionProblem
from ejkernel.kernels._attention.dropout import kept
from ejkernel.kernels._xla import attention as xla_attention
from ejkernel.kernels._xla.attention._visits import visits
from ejkernel.modules import attention
from ejkernel.types.mask import MaskInfo

T, BLOCK = 64, 8
N = T // BLOCK


def problem(batch: int = 1, **options) -> AttentionProblem:
    q = jnp.ones((batch, T, 2, 4))
    return AttentionProblem.from_arguments(q, q, q, **options)


def visited(problem: AttentionProblem) -> np.ndarray:
    plan = visits(problem, BLOCK, BLOCK)
    grid = np.zeros((N, N), int)
    for i in range(N):
        for n in range(int(plan.counts[i])):
            grid[i, int(plan.order[i, n])] += 1
    return grid


def blocks_with_pairs(mask: np.ndarray) -> np.ndarray:
    return mask.reshape(N, BLOCK, N, BLOCK).any((1, 3)).astype(int)


DISTANCE = np.arange(T) - np.arange(T)[:, None]


@pytest.mark.parametrize(
    ("options", "mask"),
    [
        ({}, np.ones((T, T), bool)),
        ({"causal": True}, DISTANCE <= 0),
        ({"sliding_window": (10, 3)}, (DISTANCE >= -10) & (DISTANCE <= 3)),
        ({"sliding_window": (9, 20), "causal": True}, (DISTANCE >= -9) & (DISTANCE <= 0)),
    ],
)
def test_bounds_known_while_tracing_leave_blocks_out(options, mask):
    assert isinstance(visits(problem(**options), BLOCK, BLOCK).order, np.ndarray)
    np.testing.assert_array_equal(visited(problem(**options)), blocks_with_pairs(mask))


def test_segments_leave_blocks_out():
    ids = np.repeat([0, 0, 1, 1, 1, 2, -1, -1], BLOCK)
    same = (ids[:, None] == ids) & (ids >= 0)
    info = MaskInfo.from_segments(jnp.asarray(ids)[None])
    np.testing.assert_array_equal(visited(problem(mask_info=info)), blocks_with_pairs(same))
    causal = problem(mask_info=info, causal=True)
    np.testing.assert_array_equal(visited(causal), blocks_with_pairs(same & (DISTANCE <= 0)))


def test_masks_leave_blocks_out():
    rng = np.random.default_rng(0)
    blocks = rng.random((2, N, N)) < 0.3
    mask = np.kron(blocks, np.ones((1, BLOCK, BLOCK), bool)).astype(bool)
    np.testing.assert_array_equal(visited(problem(2, attention_mask=mask)), blocks.any(0).astype(int))
    keys = np.repeat([1, 0, 0, 1, 0, 0, 0, 1], BLOCK).astype(bool)[None]
    np.testing.assert_array_equal(visited(problem(attention_mask=keys)), np.broadcast_to(keys[0, ::BLOCK], (N, N)).astype(int))


def test_blocks_that_are_left_out_are_not_read():
    q = jnp.ones((1, T, 2, 4))
    poisoned = q.at[:, T // 2 :].set(jnp.nan)
    cfg = AttentionConfig(block_q=BLOCK, block_k=BLOCK)
    output = attention(q[:, : T // 2], poisoned, poisoned, causal=True, dtype=None, return_weights=False, cfg=cfg)
    np.testing.assert_allclose(output, 1, rtol=1e-6)


def temporary_bytes(function, *args) -> int:
    return jax.jit(function).lower(*args).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("schedule", ["blockwise", "direct"])
def test_unused_weights_cost_nothing(schedule):
    length = 1024
    q = jnp.ones((1, length, 2, 16))
    cfg = AttentionConfig(schedule, *((64, 64) if schedule == "blockwise" else ()))
    used = temporary_bytes(lambda q: attention(q, q, q, causal=True, dtype=None, cfg=cfg)[0], q)
    alone = temporary_bytes(lambda q: attention(q, q, q, causal=True, dtype=None, return_weights=False, cfg=cfg), q)
    assert used == alone
    scores = 2 * length * length * 4
    if schedule == "blockwise":
        program = jax.jit(lambda q: attention(q, q, q, causal=True, dtype=None, cfg=cfg)[0]).lower(q).compile().as_text()
        assert f"{length},{length}" not in program
        assert used < scores / 4
        both = jax.grad(lambda q: attention(q, q, q, causal=True, dtype=None, cfg=cfg)[0].sum())
        assert temporary_bytes(both, q) < scores / 2
    else:
        assert used >= scores  # so that the test would notice a score buffer


def test_memory_is_linear_in_the_length():
    cfg = AttentionConfig(block_q=64, block_k=64)
    loss = jax.grad(lambda q: attention(q, q, q, causal=True, dtype=None, return_weights=False, cfg=cfg).sum())
    short, long = (temporary_bytes(loss, jax.ShapeDtypeStruct((1, n, 2, 16), jnp.float32)) for n in (1024, 4096))
    assert long < 4.2 * short


def test_heuristic_takes_blocks_for_long_calls_and_even_ones():
    long = jax.eval_shape(lambda: AttentionProblem.from_arguments(*(jnp.ones((1, 4100, 8, 64)) for _ in range(3))))
    cfg = xla_attention.implementation.heuristic(long)
    assert cfg.schedule == "blockwise"
    assert -(-4100 // cfg.block_q) * cfg.block_q - 4100 < 100
    assert xla_attention.implementation.heuristic(problem()).schedule == "direct"
    few = jax.ShapeDtypeStruct((1, 64, 8, 64), jnp.float32)
    wide = xla_attention.implementation.heuristic(dataclasses.replace(long, query=few))
    assert wide.block_q == 64
    assert wide.block_k > cfg.block_k
    windowed = dataclasses.replace(long, left=100, right=0)
    assert xla_attention.implementation.heuristic(windowed).block_k <= 128
    candidates = xla_attention.implementation.candidates(long)
    assert candidates[0] == cfg
    assert len(set(candidates)) == len(candidates) > 3


def test_dropout_bits_depend_on_every_bit():
    words = jax.random.bits(jax.random.key(0), (4096, 2), jnp.uint32)
    columns = jnp.arange(64)
    base = np.asarray(kept(words, columns, 0.5))
    for word in (0, 1):
        for bit in (0, 7, 16, 31):
            flipped = kept(words.at[:, word].set(words[:, word] ^ jnp.uint32(1 << bit)), columns, 0.5)
            assert abs(np.mean(np.asarray(flipped) != base) - 0.5) < 0.01
    together = (base[:, :, None] == base[:, None, :]).mean(0)
    assert np.abs(together - 0.5)[~np.eye(64, dtype=bool)].max() < 0.05
