"""`decayed_sum` on xla: inside a block one matrix product, between blocks only the last row passes on."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ejkernel.kernels import Backend, Implementation, Platform
from tests.toy.kernels import registry
from tests.toy.kernels.decayed_sum import DECAYED_SUM, SumConfig, SumProblem


class XlaSum(Implementation[SumProblem, SumConfig]):
    """Takes every call."""

    def heuristic(self, problem: SumProblem) -> SumConfig:
        return SumConfig(16, "xla")

    def candidates(self, problem: SumProblem) -> list[SumConfig]:
        return [SumConfig(block, "xla") for block in (16, 32, 64)]

    def route(self, problem: SumProblem, cfg: SumConfig) -> str:
        return f"products of {cfg.block} tokens"

    def solve(self, problem: SumProblem, cfg: SumConfig) -> jax.Array:
        B, T, D = problem.x.shape
        if T == 0:
            return problem.x  # a scan over nothing is an error without `jit`
        rows = jnp.arange(cfg.block, dtype=problem.x.dtype)
        apart = rows[:, None] - rows[None]  # [C, C]
        inside = jnp.where(apart >= 0, problem.decay ** jnp.maximum(apart, 0), 0.0)  # [C, C]
        carried = problem.decay ** (rows + 1.0)  # [C]
        blocks = jnp.pad(problem.x, ((0, 0), (0, -T % cfg.block), (0, 0))).reshape(B, -1, cfg.block, D)

        def step(last: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
            y = jnp.einsum("ts,bsd->btd", inside, x, precision="highest") + carried[None, :, None] * last[:, None]  # [B, C, D]
            return y[:, -1], y

        _, y = jax.lax.scan(step, jnp.zeros((B, D), problem.x.dtype), jnp.moveaxis(blocks, 1, 0))
        return jnp.moveaxis(y, 0, 1).reshape(B, -1, D)[:, :T]


decayed_sum = DECAYED_SUM.register(XlaSum(), registry, Platform.XLA, Backend.ANY)
