"""Small kernels that the tests of `ejkernel.ops` choose configurations for."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from ejkernel.ops import Invocation, Kernel


@dataclass(frozen=True)
class ToyConfig:
    """`block` is what heuristics and candidates vary; `kind` is how the toy behaves."""

    block: int = 16
    kind: str = "plain"


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Problem:
    """Like an operation's problem object: arrays as leaves, static fields in the tree's structure."""

    x: jax.Array
    w: jax.Array | None = None
    reverse: bool = field(default=False, metadata={"static": True})
    scale: float | None = field(default=None, metadata={"static": True})


class Toy(Kernel[ToyConfig, jax.Array]):
    """y = 2 x w, flipped along time with `reverse`."""

    op_id = "toy"

    def run(self, problem: Problem, *, platform: str | None = None, cfg: ToyConfig) -> jax.Array:
        return self.get_impl(cfg)(problem)

    def get_impl(self, cfg: ToyConfig):
        def compute(problem: Problem) -> jax.Array:
            x = problem.x[:, ::-1] if problem.reverse else problem.x
            return x * 2 if problem.w is None else x * 2 * problem.w

        return compute

    def heuristic_cfg(self, inv: Invocation) -> ToyConfig:
        return ToyConfig()

    def candidate_cfgs(self, inv: Invocation):
        return [ToyConfig(8), ToyConfig(32)]

    def check_cfg(self, inv: Invocation, cfg: ToyConfig) -> str | None:
        return None if cfg.block <= 64 else f"block {cfg.block} is larger than 64"

    def length_axes(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (1,) if name == "problem.x" else ()


class Cube(Kernel[ToyConfig, jax.Array]):
    """y = x ** 3 * n with a gradient of its own that says it is ten times as large, so that tests can tell."""

    op_id = "cube"

    def run(self, x: jax.Array, n: jax.Array, *, cfg: ToyConfig) -> jax.Array:
        return x**3 * jnp.asarray(n, jnp.float32)

    def fwd_with_residuals(self, x: jax.Array, n: jax.Array, *, cfg: ToyConfig):
        return x**3 * jnp.asarray(n, jnp.float32), {"square": x**2}

    def vjp(self, residuals, y, dy, x, n, *, cfg: ToyConfig):
        return 30 * residuals["square"] * jnp.asarray(n, jnp.float32) * dy, None

    def heuristic_cfg(self, inv: Invocation) -> ToyConfig:
        return ToyConfig()


def problem(batch: int = 2, time: int = 24, width: int = 4, dtype=jnp.float32, **rest) -> Problem:
    """A problem with distinct values."""
    return Problem(jnp.arange(batch * time * width, dtype=dtype).reshape(batch, time, width) / 7, **rest)
