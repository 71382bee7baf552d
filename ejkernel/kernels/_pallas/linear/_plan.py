"""What is static about a call, and how its arrays lie in blocks."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ejkernel.kernels._pallas._chips import LANES, Chip
from ejkernel.kernels._pallas._launch import Launch, Output
from ejkernel.kernels._pallas._products import Products

Array = jax.Array
LEAST_ROWS = 16  # rows of the smallest tile of bfloat16


@dataclasses.dataclass(frozen=True)
class Plan:
    """Everything static about a call; equal plans compile once."""

    chip: Chip
    rows: int  # tokens per chunk
    heads: int  # heads of a block, at most
    scale: float
    reverse: bool
    narrow: bool  # whether products have bfloat16 operands
    output: np.dtype
    interpret: Any

    @property
    def products(self) -> Products:
        return Products(self.narrow)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How arrays `[B, S * C, h, D]` are cut for a grid of (batch, blocks of heads, chunks).

    With channels that fill whole lanes a block is `[C, heads * D]` of `[B, S * C, h * D]`: heads lie side by side, as a
    projection writes them. Else heads come first, `[B, h, S * C, D]`.
    """

    plan: Plan
    batch: int
    chunks: int  # S
    heads: int  # H
    K: int
    V: int
    groups: tuple[int, ...]  # heads of H that share one of an array, for every array
    backwards: bool = False  # whether the grid takes the last chunk first

    @property
    def rows(self) -> int:
        return self.plan.rows

    @property
    def side_by_side(self) -> bool:
        return self.K % LANES == 0 and self.V % LANES == 0

    @property
    def together(self) -> int:
        """Heads of a block: the most that the plan allows that divide H and hold whole groups, or lie in one."""
        fits = lambda n: self.heads % n == 0 and all(n % group == 0 or group % n == 0 for group in self.groups)
        return max(n for n in range(1, min(self.plan.heads, self.heads) + 1) if fits(n))

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.batch, self.heads // self.together, self.chunks

    def launch(self, name: str) -> Launch:
        return Launch(name, self.plan.chip, self.plan.interpret, self.grid, ("parallel", "parallel", "arbitrary"))

    def chunk(self, c: Any) -> Any:
        return self.chunks - 1 - c if self.backwards else c

    def arranged(self, x: Array) -> Array:
        """`[B, S * C, h, D]` as the kernels read it."""
        B, T, h, D = x.shape
        return x.reshape(B, T, h * D) if self.side_by_side else jnp.swapaxes(x, 1, 2)

    def restored(self, x: Array, D: int) -> Array:
        """The other way round, for what the kernels wrote for all H heads."""
        return x.reshape(*x.shape[:2], self.heads, D) if self.side_by_side else jnp.swapaxes(x, 1, 2)

    def own(self, heads: int) -> int:
        """Heads of an array of `heads` heads in a block."""
        return max(self.together * heads // self.heads, 1)

    def token_spec(self, heads: int, D: int) -> pl.BlockSpec:
        own, group = self.own(heads), self.heads // heads
        whole_groups = self.together >= group  # else one of the array's heads serves several blocks
        first = lambda block: block if whole_groups else lax.div(block * self.together, np.int32(group))
        if self.side_by_side:
            return pl.BlockSpec((1, self.rows, own * D), lambda b, n, c, *_: (b, self.chunk(c), first(n)))
        return pl.BlockSpec((1, own, self.rows, D), lambda b, n, c, *_: (b, first(n), self.chunk(c), 0))

    def token_output(self, D: int, dtype: Any) -> Output:
        """One row per token and head of H."""
        B, T = self.batch, self.chunks * self.rows
        shape = (B, T, self.heads * D) if self.side_by_side else (B, self.heads, T, D)
        return Output(shape, dtype, self.token_spec(self.heads, D))

    def read(self, ref: Any, head: int, D: int, heads: int) -> Array:
        """The rows `[C, D]` of a head of the block, from a block of an array with `heads` heads."""
        place = head * self.own(heads) // self.together
        return ref[0, :, place * D : (place + 1) * D] if self.side_by_side else ref[0, place]

    def write(self, ref: Any, head: int, rows: Array) -> None:
        D = rows.shape[1]
        if self.side_by_side:
            ref[0, :, head * D : (head + 1) * D] = rows.astype(ref.dtype)
        else:
            ref[0, head] = rows.astype(ref.dtype)

    def state_spec(self) -> pl.BlockSpec:
        """The state of a chunk's sequence in `[N, H, K, V]`."""
        block = (1, self.together, self.K, self.V)
        return pl.BlockSpec(block, lambda b, n, c, sequence, *_: (sequence[b * self.chunks + self.chunk(c)], n, 0, 0))

    def start_spec(self) -> pl.BlockSpec:
        """The state before a chunk in `[B, S, H, K, V]`."""
        block = (1, 1, self.together, self.K, self.V)
        return pl.BlockSpec(block, lambda b, n, c, *_: (b, self.chunk(c), n, 0, 0))

    def per_chunk(self, *shape: int) -> pl.BlockSpec:
        """Of an array `[B, blocks of heads, S, *shape]`."""
        return pl.BlockSpec((1, 1, 1, *shape), lambda b, n, c, *_: (b, n, self.chunk(c), *[0] * len(shape)))
