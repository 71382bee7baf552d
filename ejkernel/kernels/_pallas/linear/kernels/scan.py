"""What every scan over chunks shares: a grid that takes the chunks in turn, with the states of a block of heads in VMEM.

Forward the state passes on in time; backward its adjoint passes back. What a chunk computes is its route's own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from ejkernel.kernels._pallas._launch import Input, Output, Refs, launch
from ejkernel.kernels._pallas.linear._chunks import FIRST, LAST, Chunks
from ejkernel.kernels._pallas.linear._plan import Blocks

Array = jax.Array


class Tokens(NamedTuple):
    """Queries, keys and values of a call in chunks, as `blocks` arranges them, and how many heads each array has."""

    blocks: Blocks
    chunks: Chunks
    q: Array
    k: Array
    v: Array
    q_heads: int
    k_heads: int
    v_heads: int

    @classmethod
    def of(cls, blocks: Blocks, chunks: Chunks, arrays: Mapping[str, Array]) -> Tokens:
        """From arrays `[B, T, h, D]`."""
        q, k, v = (blocks.arranged(chunks.filled(arrays[name])) for name in ("query", "key", "value"))
        heads = {f"{name[0]}_heads": arrays[name].shape[2] for name in ("query", "key", "value")}
        return cls(blocks, chunks, q, k, v, **heads)

    def inputs(self) -> dict[str, Input | None]:
        K, V = self.blocks.K, self.blocks.V
        return {
            "q": Input(self.q, self.blocks.token_spec(self.q_heads, K)),
            "k": Input(self.k, self.blocks.token_spec(self.k_heads, K)),
            "v": Input(self.v, self.blocks.token_spec(self.v_heads, V)),
        }

    def read(self, refs: Refs, h: int) -> tuple[Array, Array, Array]:
        """q `[C, K]`, k `[C, K]` and v `[C, V]` of a head of the block."""
        blocks, (K, V) = self.blocks, (self.blocks.K, self.blocks.V)
        q, k = blocks.read(refs["q"], h, K, self.q_heads), blocks.read(refs["k"], h, K, self.k_heads)
        return q, k, blocks.read(refs["v"], h, V, self.v_heads)


class Adjoints(NamedTuple):
    """What the backward pass starts from, beside the tokens."""

    starts: Array  # [B, S, H, K, V]: the state before each chunk
    do: Array  # as `blocks` arranges it
    dfinal: Array  # [N, H, K, V]
    dtypes: tuple[Any, Any, Any]  # of dq, dk and dv


class Scan(NamedTuple):
    """A kernel by name, with the arrays that it reads beside q, k and v."""

    name: str
    tokens: Tokens
    gates: Mapping[str, Input | None]
    tables: Mapping[str, Array]

    def _all_tables(self) -> dict[str, Array]:
        chunks = self.tokens.chunks
        return {"sequence": chunks.sequence, "marks": chunks.marks, **self.tables}

    def forward(self, compute: Callable[[Refs], None], initial: Array, keep: bool) -> tuple[Array, Array, Array | None]:
        """(output, final states, the state before each chunk if they are kept); compute: a chunk, for all heads of a block."""
        blocks = self.tokens.blocks
        K, V, H = blocks.K, blocks.V, blocks.heads
        made = launch(
            blocks.launch(f"{self.name}_forward" + "_with_states" * keep),
            lambda refs: _forward(blocks, compute, refs),
            self._all_tables(),
            {**self.tokens.inputs(), "initial": Input(initial, blocks.state_spec()), **self.gates},
            {
                "output": blocks.token_output(V, blocks.plan.output),
                "final": Output(initial.shape, jnp.float32, blocks.state_spec()),
                "starts": Output((blocks.batch, blocks.chunks, H, K, V), jnp.float32, blocks.start_spec()) if keep else None,
            },
            {"S": ((blocks.together, K, V), jnp.float32)},
        )
        return made["output"], made["final"], made.get("starts")

    def backward(
        self, compute: Callable[[Refs], None], given: Adjoints, gradients: Mapping[str, Output | None]
    ) -> dict[str, Array]:
        """`dq`, `dk`, `dv` (for all H heads), `dinitial`, and `gradients`: those of the gates."""
        blocks = self.tokens.blocks
        K, V, H = blocks.K, blocks.V, blocks.heads
        return launch(
            blocks.launch(f"{self.name}_backward"),
            lambda refs: _backward(blocks, compute, refs),
            self._all_tables(),
            {
                **self.tokens.inputs(),
                "do": Input(given.do, blocks.token_spec(H, V)),
                "starts": Input(given.starts, blocks.start_spec()),
                "dfinal": Input(given.dfinal, blocks.state_spec()),
                **self.gates,
            },
            {
                "dq": blocks.token_output(K, given.dtypes[0]),
                "dk": blocks.token_output(K, given.dtypes[1]),
                "dv": blocks.token_output(V, given.dtypes[2]),
                "dinitial": Output(given.dfinal.shape, jnp.float32, blocks.state_spec()),
                **gradients,
            },
            {"dS": ((blocks.together, K, V), jnp.float32)},
        )


def read_adjoint(blocks: Blocks, refs: Refs, h: int) -> Array:
    """`[C, V]` float32: the adjoint of a head's output before its scale."""
    return blocks.read(refs["do"], h, blocks.V, blocks.heads).astype(jnp.float32) * blocks.plan.scale


def _forward(blocks: Blocks, compute: Callable[[Refs], None], refs: Refs) -> None:
    mark = refs["marks"][pl.program_id(0) * blocks.chunks + pl.program_id(2)]
    S_ref = refs["S"]

    @pl.when(mark & FIRST != 0)
    def _() -> None:
        S_ref[...] = refs["initial"][0]

    if "starts" in refs:
        refs["starts"][0, 0] = S_ref[...]
    compute(refs)

    @pl.when(mark & LAST != 0)
    def _() -> None:
        refs["final"][0] = S_ref[...]


def _backward(blocks: Blocks, compute: Callable[[Refs], None], refs: Refs) -> None:
    c = pl.program_id(2)
    mark = refs["marks"][pl.program_id(0) * blocks.chunks + blocks.chunk(c)]
    dS_ref = refs["dS"]

    @pl.when((mark & LAST != 0) | (c == 0))  # chunks that packed sequences leave unused come first here
    def _() -> None:
        dS_ref[...] = refs["dfinal"][0]

    compute(refs)

    @pl.when(mark & FIRST != 0)
    def _() -> None:
        refs["dinitial"][0] = dS_ref[...]
