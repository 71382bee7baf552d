"""The gates of a call merged into what the kernels take, and their gradients taken apart again.

`g` and `g_gamma` are one log decay per token and head. Alone they go to the kernels of one gate per head. Beside gates per
channel they are added to those of the keys, else of the values: a decay of the whole state is one of every row and column.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ejkernel.kernels._pallas._products import LEAST_LOG
from ejkernel.kernels._pallas.linear._chunks import Chunks
from ejkernel.kernels._pallas.linear._plan import Blocks
from ejkernel.kernels._pallas.linear.kernels.channel_gates import Channels
from ejkernel.kernels._pallas.linear.kernels.head_gate import Decays

Array = jax.Array


class Gates(NamedTuple):
    """The gates in chunks, `[B, S * C, h]` and `[B, S * C, h, D]`."""

    chunks: Chunks
    heads: int
    sequences: int
    g: Array | None
    g_gamma: Array | None  # [N, H]
    gk: Array | None
    gv: Array | None

    @classmethod
    def of(cls, chunks: Chunks, arrays: dict[str, Array]) -> Gates:
        given = {name: chunks.filled(arrays[name]) if name in arrays else None for name in ("g", "gk", "gv")}
        gamma = arrays.get("g_gamma")
        sequences = arrays["query"].shape[0] if gamma is None else gamma.shape[0]
        return cls(chunks, arrays["query"].shape[2], sequences, g_gamma=gamma, **given)

    @property
    def per_channel(self) -> bool:
        return self.gk is not None or self.gv is not None

    def per_head(self) -> Array | None:
        """`[B, S * C, H]` float32: what decays whole states."""
        log = None
        if self.g is not None:
            log = jnp.repeat(self.g.astype(jnp.float32), self.heads // self.g.shape[2], axis=2)
        if self.g_gamma is not None:
            chunks = self.chunks
            own = self.g_gamma.astype(jnp.float32)[chunks.sequence]  # [B * S, H]
            own = jnp.repeat(own, chunks.rows, axis=0).reshape(-1, chunks.count * chunks.rows, self.heads)
            there = chunks.filled(jnp.ones((1, chunks.tokens, 1), bool))
            own = jnp.where(there, own, 0.0)
            log = own if log is None else log + own
        return log

    def decays(self, blocks: Blocks) -> Decays | None:
        log = self.per_head()
        return None if log is None else Decays.of(blocks, log)

    def channels(self, blocks: Blocks) -> Channels:
        """Both gates as the kernels read them; -inf as a decay that is 0 as well and times 0 not NaN."""
        log, merged = self.per_head(), {"gk": self.gk, "gv": self.gv}
        if log is not None:
            name = "gk" if self.gk is not None else "gv"
            gate = merged[name]
            assert gate is not None
            wide = jnp.repeat(gate, self.heads // gate.shape[2], axis=2).astype(jnp.float32)
            merged[name] = wide + log[..., None]
        heads = tuple(None if x is None else x.shape[2] for x in merged.values())
        gk, gv = (None if x is None else blocks.arranged(jnp.maximum(x, LEAST_LOG)) for x in merged.values())
        return Channels(gk, gv, *heads)

    def gradients(self, blocks: Blocks, made: dict[str, Array]) -> dict[str, Array]:
        """The gates' gradients, for all H heads, from those of what the kernels took."""
        chunks, found = self.chunks, {}
        for name, D in (("gk", blocks.K), ("gv", blocks.V)):
            if f"d{name}" in made:
                found[name] = blocks.restored(made[f"d{name}"], D)
        dlog = made.get("dlog")
        if self.per_channel and (self.g is not None or self.g_gamma is not None):
            dlog = jnp.sum(found["gk" if self.gk is not None else "gv"], -1)
        found = {name: chunks.taken(x) for name, x in found.items()}
        if dlog is not None:
            found["g"] = chunks.taken(dlog)
            found["g_gamma"] = self._per_sequence(dlog)
        return found

    def _per_sequence(self, dlog: Array) -> Array:
        """`[N, H]`: sums over the tokens of each sequence, of rows that hold one."""
        chunks = self.chunks
        dlog = jnp.where(chunks.filled(jnp.ones((1, chunks.tokens, 1), bool)), dlog, 0.0)
        if chunks.source is None:
            return jnp.sum(dlog, 1)
        per_chunk = jnp.sum(dlog.reshape(-1, chunks.rows, self.heads), 1)  # [S, H]
        return jax.ops.segment_sum(per_chunk, chunks.sequence, self.sequences, indices_are_sorted=True)
