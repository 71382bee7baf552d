"""The delta rule over the chunks of a call, forward and backward: one kernel each.

A block holds several heads, which are independent, so the compiler fills one's latencies with the others' work. The backward
pass starts from the state before each chunk, which the forward pass kept, and computes everything else anew.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels._pallas._launch import Input, Output, Refs
from ejkernel.kernels._pallas._products import LEAST_LOG
from ejkernel.kernels._pallas.gated_delta_rule.kernels import channel_gate, chunk, head_gate
from ejkernel.kernels._pallas.gated_delta_rule.kernels.chunk import Rows, Scores
from ejkernel.kernels._pallas.gated_delta_rule.kernels.triangular import UnitLower
from ejkernel.kernels._pallas.linear._plan import Blocks
from ejkernel.kernels._pallas.linear.kernels.scan import Adjoints, Scan, Tokens, read_adjoint

Array = jax.Array


class Call(NamedTuple):
    """A call in chunks, as the kernels read it; a gate is per head (`g`), per key channel (`gk`), or missing."""

    tokens: Tokens
    columns: Array  # [B, blocks of heads, S, C, heads or 4 * heads]: beta; with a gate per head also what `_log_columns` gives
    rows: Array  # [B, blocks of heads, S, heads, C]: beta
    gk: Array | None

    @classmethod
    def of(cls, tokens: Tokens, arrays: dict[str, Array]) -> Call:
        """From arrays `[B, T, h, ...]`."""
        blocks, chunks = tokens.blocks, tokens.chunks
        beta = _by_blocks(blocks, chunks.filled(arrays["beta"]).astype(jnp.float32))
        # -inf as a decay that is 0 as well, and times 0 not NaN
        gates = {name: chunks.filled(arrays[name]).astype(jnp.float32) for name in ("g", "gk") if name in arrays}
        logs = {name: jnp.maximum(log, LEAST_LOG) for name, log in gates.items()}
        return cls(
            tokens,
            columns=jnp.concatenate([beta, *_log_columns(_by_blocks(blocks, logs["g"]))], -1) if "g" in logs else beta,
            rows=jnp.swapaxes(beta, 3, 4),
            gk=blocks.arranged(logs["gk"]) if "gk" in logs else None,
        )

    @property
    def blocks(self) -> Blocks:
        return self.tokens.blocks

    @property
    def gated(self) -> bool:
        """Per head."""
        return self.columns.shape[-1] > self.blocks.together

    def scan(self) -> Scan:
        blocks, heads, C = self.blocks, self.blocks.together, self.blocks.rows
        gates = {
            "columns": Input(self.columns, blocks.per_chunk(C, self.columns.shape[-1])),
            "rows": Input(self.rows, blocks.per_chunk(heads, C)),
            "gk": None if self.gk is None else Input(self.gk, blocks.token_spec(blocks.heads, blocks.K)),
        }
        return Scan("delta_rule", self.tokens, gates, {})


def _by_blocks(blocks: Blocks, x: Array) -> Array:
    """`[B, S * C, H]` as `[B, blocks of heads, S, C, heads]`."""
    B, heads, S, C = blocks.batch, blocks.together, blocks.chunks, blocks.rows
    return jnp.moveaxis(x.reshape(B, S, C, -1, heads), 3, 1)


def _log_columns(log: Array) -> tuple[Array, Array, Array]:
    """Log decays `[..., C, heads]`: their sums up to each row, those after it, and themselves. XLA adds them up."""
    after = jnp.pad(log[..., 1:, :], [(0, 0)] * (log.ndim - 2) + [(0, 1), (0, 0)])  # the decay comes before the update
    return jnp.cumsum(log, axis=-2), lax.cumsum(after, axis=log.ndim - 2, reverse=True), log


def _log_gradient(pre: Array, suf: Array, spans: Array) -> Array:
    """The gradient of the log decays `[..., C, heads]` from `head_gate.LogGrads`."""
    before = jnp.cumsum(jnp.pad(suf, [(0, 0)] * (suf.ndim - 2) + [(1, 0), (0, 0)])[..., :-1, :], axis=-2)
    return lax.cumsum(pre, axis=pre.ndim - 2, reverse=True) + before + spans


def forward(call: Call, initial: Array, keep: bool) -> tuple[Array, Array, Array | None]:
    """(output, final states, the state before each chunk if they are kept)."""
    return call.scan().forward(lambda refs: _forward(call, refs), initial, keep)


def backward(call: Call, given: Adjoints) -> dict[str, Array]:
    """`dq`, `dk`, `dv` and `dgk` as the blocks lie, `dinitial`, and `dbeta`, `dg` `[B, S * C, H]`, all for H heads."""
    blocks, heads = call.blocks, call.blocks.together
    B, N, S, C = blocks.batch, blocks.grid[1], blocks.chunks, blocks.rows
    of_gates = {
        "dgk": None if call.gk is None else blocks.token_output(blocks.K, jnp.float32),
        "dcolumns": Output((B, N, S, C, call.columns.shape[-1]), jnp.float32, blocks.per_chunk(C, call.columns.shape[-1])),
    }
    made = call.scan().backward(lambda refs: _backward(call, refs), given, of_gates)
    columns = made.pop("dcolumns")
    together = lambda x: jnp.moveaxis(x, 1, 3).reshape(B, S * C, blocks.heads)
    made["dbeta"] = together(columns[..., :heads])
    if call.gated:
        made["dg"] = together(_log_gradient(*(columns[..., i * heads : (i + 1) * heads] for i in (1, 2, 3))))
    return made


class Head(NamedTuple):
    """What one head of a block has in a chunk."""

    call: Call
    q: Array  # [C, K]
    k: Array  # [C, K]
    rows: Rows
    decay: head_gate.Decay | None
    log: Array | None  # [C, K]

    @classmethod
    def read(cls, call: Call, refs: Refs, h: int) -> Head:
        blocks, heads = call.blocks, call.blocks.together
        column = lambda place: refs["columns"][0, 0, 0, :, place : place + 1]  # [C, 1]
        q, k, v = (x.astype(jnp.float32) for x in call.tokens.read(refs, h))
        decay = head_gate.Decay.of(blocks.plan.products, *(column(i * heads + h) for i in (1, 2, 3))) if call.gated else None
        log = None if call.gk is None else blocks.read(refs["gk"], h, blocks.K, blocks.heads)
        return cls(call, q, k, Rows(v, column(h), refs["rows"][0, 0, 0, h : h + 1, :]), decay, log)

    def scores(self) -> Scores:
        mm = self.call.blocks.plan.products
        if self.log is not None:
            return channel_gate.scores(mm, self.q, self.k, self.log, self.call.blocks.V)
        return head_gate.scores(mm, self.q, self.k, self.decay)


def _heads(call: Call, refs: Refs) -> list[tuple[Head, Scores, UnitLower]]:
    """What of a chunk does not depend on the state, for all heads of a block: they go through its long chains side by side."""
    heads = [Head.read(call, refs, h) for h in range(call.blocks.together)]
    scores = [head.scores() for head in heads]
    systems = [s.M * head.rows.b_row for head, s in zip(heads, scores, strict=True)]  # [C, C]
    return list(zip(heads, scores, UnitLower.of_each(call.blocks.plan.products, systems), strict=True))


def _forward(call: Call, refs: Refs) -> None:
    blocks, S_ref = call.blocks, refs["S"]
    for h, (head, s, system) in enumerate(_heads(call, refs)):
        output, S_ref[h] = chunk.forward(blocks.plan.products, s, system, head.rows, S_ref[h])
        blocks.write(refs["output"], h, output * blocks.plan.scale)


def _backward(call: Call, refs: Refs) -> None:
    for h, (head, s, system) in enumerate(_heads(call, refs)):
        _backward_head(call, refs, h, head, s, system)


def _backward_head(call: Call, refs: Refs, h: int, head: Head, s: Scores, system: UnitLower) -> None:
    blocks, mm, heads = call.blocks, call.blocks.plan.products, call.blocks.together
    do = read_adjoint(blocks, refs, h)  # [C, V]
    dv, db, refs["dS"][h], d = chunk.backward(mm, s, system, head.rows, refs["starts"][0, 0, h], refs["dS"][h], do)
    if head.log is not None:
        dq, dk, dlog = channel_gate.gradients(mm, head.q, head.k, head.log, s, d)
        blocks.write(refs["dgk"], h, dlog)
    else:
        dq, dk, dg = head_gate.gradients(mm, head.q, head.k, head.decay, s, d)
        for i, x in enumerate(() if dg is None else dg, 1):
            refs["dcolumns"][0, 0, 0, :, i * heads + h : i * heads + h + 1] = x
    refs["dcolumns"][0, 0, 0, :, h : h + 1] = db
    for name, grad in (("dq", dq), ("dk", dk), ("dv", dv)):
        blocks.write(refs[name], h, grad)
