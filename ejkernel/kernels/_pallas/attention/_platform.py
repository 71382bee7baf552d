"""Softmax attention on TPUs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
from jaxtyping import Array, Float

from ejkernel._device import interpretation
from ejkernel.kernels._attention import AttentionConfig, AttentionProblem
from ejkernel.kernels._attention.direct import direct_weights
from ejkernel.kernels._implementation import Implementation
from ejkernel.kernels._pallas._chips import LANES, MIB, not_a_tpu
from ejkernel.kernels._pallas._meshes import split_by_the_compiler
from ejkernel.kernels._pallas.attention._plan import Plan, blocks, chip_of_call, padded, vmem, vmem_limit, why_not
from ejkernel.kernels._pallas.attention._positions import attended

HEURISTIC = AttentionConfig("flash", platform="pallas", backend="tpu")
BLOCKS = ((256, 256), (256, 512), (512, 512), (512, 1024), (1024, 512), (1024, 1024))


class PallasAttention(Implementation[AttentionProblem, AttentionConfig]):
    """Softmax attention by JAX's splash attention kernel; `supports` says what it covers.

    What a field of a configuration does:

        block_q      queries of a block, a multiple of 128; None: 512 or less, by the length and the chip's VMEM
        block_k      keys of a block, likewise
    """

    def supports(self, problem: AttentionProblem) -> str | None:
        return not_a_tpu(problem.device) or why_not(problem) or split_by_the_compiler(problem.device)

    def preferred(self, problem: AttentionProblem) -> bool:
        """Not for a few queries, which would be padded to a block of 128."""
        return problem.q_len > 16

    def refuses(self, problem: AttentionProblem, cfg: AttentionConfig) -> str | None:
        if cfg.schedule != "flash":
            return f"pallas has only schedule 'flash', not {cfg.schedule!r}"
        for name in ("block_q", "block_k"):
            if (getattr(cfg, name) or LANES) % LANES:
                return f"{name} must be None or a multiple of {LANES} on pallas; got {getattr(cfg, name)}"
        for name in ("num_warps", "num_stages"):
            if getattr(cfg, name) is not None:
                return f"{name} must be None on pallas, which has no such thing; got {getattr(cfg, name)}"
        block_q, block_k = blocks(problem, cfg)
        needs, has = vmem(problem, block_q, block_k), vmem_limit(problem)
        if needs > has:
            figures = f"{needs / MIB + 0.05:.1f} MiB of VMEM and a kernel has {has / MIB:.1f} MiB"  # the need rounded up
            return (
                f"blocks of {block_q} queries and {block_k} keys need about {figures} on {chip_of_call(problem).name}: "
                "use a smaller block_q or block_k, or None"
            )
        return None

    def heuristic(self, problem: AttentionProblem) -> AttentionConfig:
        return HEURISTIC

    def candidates(self, problem: AttentionProblem) -> Sequence[AttentionConfig]:
        """The heuristic first; then blocks that are no longer than the sequences and that VMEM holds."""
        longest = padded(problem.q_len, LANES), padded(problem.kv_len, LANES)
        fitting = [(q, k) for q, k in BLOCKS if q <= longest[0] and k <= longest[1]]
        named = [dataclasses.replace(HEURISTIC, block_q=q, block_k=k) for q, k in fitting]
        return [HEURISTIC, *(cfg for cfg in named if self.refuses(problem, cfg) is None)]

    def route(self, problem: AttentionProblem, cfg: AttentionConfig) -> str:
        return (
            "splash attention"
            if problem.q_positions is None
            else "splash attention, or xla where positions do not count tokens"
        )

    def solve(
        self, problem: AttentionProblem, cfg: AttentionConfig
    ) -> tuple[Float[Array, "B T H V"], Float[Array, "B H T S"] | None]:
        alone = dataclasses.replace(problem, packing=None, return_weights=False)
        return attended(alone, Plan.of(problem, cfg, interpretation())), _weights(problem) if problem.return_weights else None


_weights = jax.jit(direct_weights)
