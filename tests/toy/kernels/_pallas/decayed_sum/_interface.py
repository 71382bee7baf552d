"""`decayed_sum` on pallas (interpreted, so that it runs on a CPU): one program per sequence, one token after another."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.kernels import Backend, Implementation, Platform
from tests.toy.kernels import registry
from tests.toy.kernels.decayed_sum import DECAYED_SUM, SumConfig, SumProblem


class PallasSum(Implementation[SumProblem, SumConfig]):
    """Sums whose channels fit one program."""

    def supports(self, problem: SumProblem) -> str | None:
        return None if problem.x.shape[2] <= 128 else f"it holds up to 128 channels; x has {problem.x.shape[2]}"

    def refuses(self, problem: SumProblem, cfg: SumConfig) -> str | None:
        return None if cfg.block <= 32 else f"block must be at most 32 on pallas; got {cfg.block}"

    def heuristic(self, problem: SumProblem) -> SumConfig:
        return SumConfig(8, "pallas")

    def candidates(self, problem: SumProblem) -> list[SumConfig]:
        return [SumConfig(block, "pallas") for block in (8, 32)]

    def route(self, problem: SumProblem, cfg: SumConfig) -> str:
        return "one token after another"

    def solve(self, problem: SumProblem, cfg: SumConfig) -> jax.Array:
        return _sum(problem.decay, cfg.block, problem.x)


# Pallas has no derivative of its own: the transpose of a decayed sum is the decayed sum from the other end.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _sum(decay: float, block: int, x: jax.Array) -> jax.Array:
    B, T, D = x.shape
    steps = max(-(-T // block), 1) * block
    padded = jnp.pad(x, ((0, 0), (0, steps - T), (0, 0)))

    def kernel(x_ref, y_ref):
        def body(t: jax.Array, last: jax.Array) -> jax.Array:
            last = decay * last + x_ref[0, t]  # [D]
            y_ref[0, t] = last
            return last

        jax.lax.fori_loop(0, steps, body, jnp.zeros(D, x.dtype))

    whole = pl.BlockSpec((1, steps, D), lambda b: (b, 0, 0))
    shape = jax.ShapeDtypeStruct(padded.shape, x.dtype)
    return pl.pallas_call(kernel, out_shape=shape, grid=(B,), in_specs=[whole], out_specs=whole, interpret=True)(padded)[:, :T]


def _forward(decay: float, block: int, x: jax.Array) -> tuple[jax.Array, None]:
    return _sum(decay, block, x), None


def _backward(decay: float, block: int, _: None, dy: jax.Array) -> tuple[jax.Array]:
    return (_sum(decay, block, dy[:, ::-1])[:, ::-1],)


_sum.defvjp(_forward, _backward)
decayed_sum = DECAYED_SUM.register(PallasSum(), registry, Platform.PALLAS, Backend.ANY, priority=-1)
