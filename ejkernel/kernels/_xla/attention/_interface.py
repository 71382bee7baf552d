"""Softmax attention in plain JAX, for every device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable

import jax
from jaxtyping import Array, Float

from ejkernel._kept import ATTENTION_OUTPUT, named
from ejkernel._meshes import run_partitioned
from ejkernel._sizes import known
from ejkernel.kernels._attention import AttentionConfig, AttentionProblem
from ejkernel.kernels._attention.direct import direct_output, direct_weights
from ejkernel.kernels._attention.operation import ATTENTION
from ejkernel.kernels._implementation import Implementation
from ejkernel.kernels._registry import Backend, Platform, backend_of, kernel_registry
from ejkernel.kernels._xla.attention._blockwise import blockwise_output

OUTPUT, WEIGHTS = ("batch", "queries", "heads", "value channels"), ("batch", "heads", "queries", "keys")
BLOCKWISE_SPLITS, DIRECT_SPLITS = ("batch", "heads"), ("batch", "heads", "queries")
# Below this many scores a direct call is as fast, and it can be differentiated forward too.
DIRECT_SCORES = 1 << 20
UNKNOWN_BLOCK = 256  # of lengths that are not known: a short call is padded to it
# How many scores a tile should have: enough work for a step, in few enough megabytes to stay near the cores. Measured on
# CPU; XLA before jax 0.11 keeps small products on one core, so its tiles are larger. Accelerators pay more for each step.
TILE_SCORES = {
    Backend.CPU: 1 << (20 if jax.__version_info__ >= (0, 11) else 21),
    Backend.GPU: 1 << 25,
    Backend.TPU: 1 << 22,
}


class XlaAttention(Implementation[AttentionProblem, AttentionConfig]):
    """Direct or blockwise; takes every call."""

    def preferred(self, problem: AttentionProblem) -> bool:
        """On a GPU only for a single query: whatever else has kernels for a call there is several times faster."""
        return backend_of(problem.device) is not Backend.GPU or problem.q_len == 1

    def refuses(self, problem: AttentionProblem, cfg: AttentionConfig) -> str | None:
        if cfg.schedule in ("fused", "flash"):
            return f"schedule {cfg.schedule!r} is of another platform's kernels; xla has 'direct' and 'blockwise'"
        return None

    def heuristic(self, problem: AttentionProblem) -> AttentionConfig:
        if not known(problem.batch, problem.q_len, problem.kv_len):
            return AttentionConfig("blockwise", UNKNOWN_BLOCK, UNKNOWN_BLOCK, platform="xla")
        if problem.score_count <= DIRECT_SCORES or min(problem.q_len, problem.kv_len) == 1:
            return AttentionConfig("direct", platform="xla")
        block_q, block_k = _blocks(problem)
        return AttentionConfig("blockwise", _even(problem.q_len, block_q), _even(problem.kv_len, block_k), platform="xla")

    def candidates(self, problem: AttentionProblem) -> list[AttentionConfig]:
        first = self.heuristic(problem)
        sizes = [(q, k) for q in (128, 256, 512, 1024) for k in (128, 256, 512, 1024) if q <= k <= 2 * q]
        fitting = {(_even(problem.q_len, q), _even(problem.kv_len, k)) for q, k in sizes}
        others = [AttentionConfig("blockwise", q, k, platform="xla") for q, k in sorted(fitting)]
        direct = [AttentionConfig("direct", platform="xla")] if problem.score_count <= 1 << 28 else []
        return [first, *(cfg for cfg in direct + others if cfg != first)]

    def route(self, problem: AttentionProblem, cfg: AttentionConfig) -> str:
        return "all scores at once" if cfg.schedule == "direct" else f"blocks of {cfg.block_q} x {cfg.block_k}"

    def solve(
        self, problem: AttentionProblem, cfg: AttentionConfig
    ) -> tuple[Float[Array, "B T H V"], Float[Array, "B H T S"] | None]:
        # Two programs: the output must not wait for, nor depend on, weights that nobody looks at.
        output = _output(dataclasses.replace(problem, return_weights=False), cfg)
        return output, direct_weights_program(problem) if problem.return_weights else None


@functools.partial(jax.jit, static_argnames="cfg")
def _output(problem: AttentionProblem, cfg: AttentionConfig) -> Float[Array, "B T H V"]:
    if cfg.schedule == "direct":
        return named(ATTENTION_OUTPUT, _partitioned(direct_output, problem, DIRECT_SPLITS, OUTPUT))
    assert cfg.block_q is not None
    assert cfg.block_k is not None
    run = functools.partial(blockwise_output, block_q=cfg.block_q, block_k=cfg.block_k)
    return _partitioned(run, problem, BLOCKWISE_SPLITS, OUTPUT)


@jax.jit
def direct_weights_program(problem: AttentionProblem) -> Float[Array, "B H T S"]:
    """The weights alone."""
    return _partitioned(direct_weights, problem, DIRECT_SPLITS, WEIGHTS)


def _partitioned(
    run: Callable[[AttentionProblem], Array], problem: AttentionProblem, free: tuple[str, ...], output: tuple[str, ...]
) -> Array:
    """`run(problem)` on a mesh that splits the `free` axes."""
    arrays = {name: x for name, x in vars(problem).items() if isinstance(x, jax.Array)}
    advice = (
        f"Here {', '.join(free[:-1])} and {free[-1]} may be split: gather the other axis first, with "
        f"jax.sharding.reshard(x, jax.P(...)) that names None there."
    )
    function = lambda arrays: (run(dataclasses.replace(problem, **arrays)),)
    return run_partitioned(function, arrays, problem.roles(), (output,), free, advice)[0]


def _blocks(problem: AttentionProblem) -> tuple[int, int]:
    """Powers of two: squares from 128 to 1024, as large as TILE_SCORES allows and no larger than a window needs.

    Where one length is shorter than a square's side, the other side grows: a few queries look at many keys in a step.
    """
    most, rows = TILE_SCORES[backend_of(problem.device)], problem.batch * problem.heads
    window = None if problem.left is None or problem.right is None else problem.left + problem.right
    size = 1024
    while size > 128 and (rows * size * size > most or (window is not None and size > window)):
        size //= 2
    block_q = block_k = size
    while window is None and block_q // 2 >= problem.q_len:
        block_q, block_k = block_q // 2, block_k * 2
    while window is None and block_k // 2 >= problem.kv_len:
        block_q, block_k = block_q * 2, block_k // 2
    return block_q, block_k


def _even(length: int, block: int) -> int:
    """The length cut into as many equal parts as blocks are needed: the last block is then not mostly padding."""
    return -(-length // -(-length // block)) if length else 1


attention = ATTENTION.register(XlaAttention(), kernel_registry, Platform.XLA, Backend.ANY)
