"""What the splash kernel covers of softmax attention, and the blocks that a call runs with."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp

from ejkernel.kernels._attention import AttentionConfig, AttentionProblem
from ejkernel.kernels._pallas._chips import LANES, MIB, Chip, chip_of

MAX_CHANNELS = 512
USUAL_BLOCK = 512  # of queries and of keys, where the configuration leaves them open and VMEM holds them
# Bytes of VMEM that the compiler grants a kernel that names no limit: JAX's splash kernels name none.
GRANTED = {"v4": 16 * MIB, "v5e": 16 * MIB, "v5p": 16 * MIB, "v6e": 32 * MIB, "tpu7x": 32 * MIB}
# How much longer than necessary a padded sequence may be for the sake of larger blocks.
MOST_PADDING = 1.2


@dataclasses.dataclass(frozen=True)
class Plan:
    """All that the kernels of a call depend on, beside the shapes of its arrays.

    Attributes:
        block_q, block_k: queries and keys of a block, multiples of 128.
        left, right: the bounds on indices, as in the problem.
        soft_cap: as in the problem.
        precise: products in float32, by six bfloat16 passes; for float32 inputs.
        interpret: how `pallas_call` runs the kernels; False compiles them.
    """

    block_q: int
    block_k: int
    left: int | None
    right: int | None
    soft_cap: float | None
    precise: bool
    interpret: Any

    @classmethod
    def of(cls, problem: AttentionProblem, cfg: AttentionConfig, interpret: Any) -> Plan:
        block_q, block_k = blocks(problem, cfg)
        return cls(
            block_q=block_q,
            block_k=block_k,
            left=problem.left,
            right=problem.right,
            soft_cap=problem.soft_cap,
            precise=problem.dtype == jnp.float32,
            interpret=interpret,
        )


def padded(length: int, block: int) -> int:
    """The length rounded up to whole blocks."""
    return -(-length // block) * block


def fitting_block(length: int, largest: int = USUAL_BLOCK) -> int:
    """The largest block up to `largest` that does not lengthen the sequence by much.

    Example:
        >>> [fitting_block(n) for n in (0, 1, 200, 512, 640, 896, 4096)]
        [128, 128, 256, 512, 384, 512, 512]
    """
    length = max(length, 1)  # a call without queries or keys runs no kernel, and has a plan all the same
    most = MOST_PADDING * padded(length, LANES)
    sizes = range(min(largest, padded(length, LANES)), 0, -LANES)
    return next(size for size in sizes if padded(length, size) <= most)


def blocks(problem: AttentionProblem, cfg: AttentionConfig) -> tuple[int, int]:
    """Queries and keys of a block: as configured, else the largest that VMEM holds and that fit the lengths."""
    found = LANES, LANES
    for largest in range(USUAL_BLOCK, 0, -LANES):
        found = cfg.block_q or fitting_block(problem.q_len, largest), cfg.block_k or fitting_block(problem.kv_len, largest)
        if vmem(problem, *found) <= vmem_limit(problem):
            break
    return found


def chip_of_call(problem: AttentionProblem) -> Chip:
    chip = chip_of(problem.device)
    assert chip is not None  # else `supports` said no
    return chip


def vmem_limit(problem: AttentionProblem) -> int:
    """Bytes that one kernel may use."""
    return GRANTED[chip_of_call(problem).name]


def vmem(problem: AttentionProblem, block_q: int, block_k: int) -> int:
    """Bytes of VMEM that a call needs, about, with the registers that it spills. Fitted to what libtpu says of the kernels.

    The gradient of keys and values holds most: four arrays with rows of keys, and their sums in float32. Longer blocks of
    queries turn that round, in the other two kernels: the longer of the blocks is the one with most arrays here.
    """
    short, long = sorted((block_q, block_k))
    channels = sum(padded(size, LANES) for size in (problem.head_dim, problem.value_dim))
    wide = problem.dtype == jnp.float32 or problem.sinks is not None  # whose output is in float32
    operands = (4 if wide else 2) * channels * (short + long)  # q, do; k, v
    results = (4 if wide else 2) * channels * long  # dk, dv
    sums = 4 * channels * long
    per_row = 4 * LANES * long  # ids of segments, one for each row, which take whole registers
    scores = 4 * short * long * (2 if problem.soft_cap is None else 3)
    spilled = scores + (operands * 5 // 2 if wide else operands // 2)  # these are split into bfloat16 parts in float32
    return 2 * (operands + results + sums + per_row) + spilled  # while one block is computed with, the next is read


def why_not(problem: AttentionProblem) -> str | None:
    """The reason why the splash kernel cannot take this call; None when it can. Looks at shapes and dtypes only."""
    return _operands(problem) or _options(problem)


def _operands(problem: AttentionProblem) -> str | None:
    if problem.dtype not in (jnp.bfloat16, jnp.float32):
        return f"TPU kernels compute in bfloat16 and float32, not {problem.dtype}: platform='xla' has it"
    if problem.softmax_dtype != jnp.float32:
        return f"the softmax of the TPU kernel is in float32, not {problem.softmax_dtype}: platform='xla' has others"
    if max(problem.head_dim, problem.value_dim) > MAX_CHANNELS:
        sizes = f"{problem.head_dim} and {problem.value_dim}"
        return f"channels of keys and values go up to {MAX_CHANNELS}; got {sizes}: use platform='xla'"
    return None


def _options(problem: AttentionProblem) -> str | None:
    if problem.bias is not None:
        return "a bias is not covered by the TPU kernel: platform='xla' takes it"
    if problem.dropout_words is not None:
        return "dropout is not covered by the TPU kernel: platform='xla' has it"
    mask = problem.mask
    if mask is not None and (mask.shape[1] > 1 or (mask.shape[2] > 1 and problem.q_len > 1)):
        return (
            "a mask over pairs of queries and keys is not covered by the TPU kernel, only one over keys, [B, S]: "
            "say it by segments (mask_info), or take platform='xla'"
        )
    if problem.kv_len == 1 or (problem.q_positions is None and problem.left == problem.right == 0):
        return "every query has one key, whose weight is 1 and has no gradient; platform='xla' is exact there"
    if problem.q_positions is not None and problem.q_len != problem.kv_len:
        return "positions (mask_info) of other keys than queries are not covered by the TPU kernel: platform='xla' has them"
    return None
