"""States that travel along a mesh axis over which time is split.

A shard's tokens act on the state that comes in as an affine map, S_out = M S_in + U. `Shards.incoming` composes the maps of all
shards before this one and applies them to the first state. `Shards.outgoing_adjoint` sends adjoints in the other direction; of
the forward pass it needs only the maps M. There are two exchanges. "gather": every shard gets all maps in one collective and
composes them itself. "steps": log2(shards) exchanges of one map each.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel.kernels._linear.config import Exchange

Array = jax.Array
MOST_GATHERED = 8  # shards, a node of GPUs: beyond it bytes weigh more than latencies (docs/several_devices.md, the model)


class Maps(Protocol):
    """What a family's M are: pytrees of arrays [b, H, ...]."""

    def apply(self, M: Any, S: Array) -> Array: ...
    def transposed(self, M: Any, S: Array) -> Array: ...
    def composed(self, after: Any, before: Any) -> Any: ...


@dataclasses.dataclass(frozen=True)
class Shards:
    """The shards of a sequence along a mesh axis, counted in the order in which the recurrence goes through them."""

    axis: str
    count: int
    reverse: bool
    exchange: Exchange

    @classmethod
    def of(cls, axis: Any, reverse: bool, exchange: Exchange | None = None) -> Shards:
        count = axis_size(axis)
        return cls(axis, count, reverse, exchange or ("gather" if count <= MOST_GATHERED else "steps"))

    @property
    def index(self) -> Array:
        place = lax.axis_index(self.axis)
        return self.count - 1 - place if self.reverse else place

    def incoming(self, maps: Maps, U: Array, M: Any, passes: Array, S0: Array) -> tuple[Array, Any]:
        """(the state that comes in, what `outgoing_adjoint` needs).

        Args:
            U: what goes out where nothing comes in.
            passes: [shards] whether the state that comes in also goes out; where it does not, M may hold anything.
            S0: what comes in at the first shard.
        """
        if self.count == 1:
            return S0, None
        return (self._gathered if self.exchange == "gather" else self._stepped)(maps, U, M, passes, S0)

    def outgoing_adjoint(self, maps: Maps, kept: Any, passes: Array, G: Array) -> Array:
        """The adjoint of the state that goes out. G: this shard's own part of the adjoint of the state that comes in."""
        if self.count == 1:
            return jnp.zeros_like(G)
        return (self._gathered_back if self.exchange == "gather" else self._stepped_back)(maps, kept, passes, G)

    def _gathered(self, maps: Maps, U: Array, M: Any, passes: Array, S0: Array) -> tuple[Array, Any]:
        all_U, all_M = self._all((U, M))
        index = self.index

        def step(S: Array, shard: Any) -> tuple[Array, None]:
            number, U, M, through = shard
            after = jnp.where(through, maps.apply(M, S), 0) + U
            return jnp.where(number < index, after, S), None

        before = jnp.arange(self.count - 1, dtype=index.dtype)
        S, _ = lax.scan(step, S0, (before, *jax.tree.map(lambda x: x[:-1], (all_U, all_M)), passes[:-1]))
        return S, all_M

    def _gathered_back(self, maps: Maps, all_M: Any, passes: Array, G: Array) -> Array:
        all_G = self._all(G)
        index = self.index

        def step(X: Array, shard: Any) -> tuple[Array, None]:
            number, G, M, through = shard
            before = G + jnp.where(through, maps.transposed(M, X), 0)
            return jnp.where(number > index, before, X), None

        after = jnp.arange(1, self.count, dtype=index.dtype)
        rest = jax.tree.map(lambda x: x[1:], (all_G, all_M))
        return lax.scan(step, jnp.zeros_like(G), (after, *rest, passes[1:]), reverse=True)[0]

    def _stepped(self, maps: Maps, U: Array, M: Any, passes: Array, S0: Array) -> tuple[Array, Any]:
        index, through, kept = self.index, passes, []
        for hop in self._hops():
            kept.append(M)
            U_before, M_before = self._sent((U, M), hop)
            reached = through & (jnp.arange(self.count) >= hop)  # [shards]: something comes from so far, and goes through
            U = jnp.where(reached[index], maps.apply(M, U_before), 0) + U
            composed = maps.composed(M, M_before)
            M = jax.tree.map(lambda new, old: jnp.where(index >= hop, new, old), composed, M)  # noqa: B023  (called here)
            through = self._longer(through, hop)
        U, M = self._sent((U, M), 1)
        first = jnp.where(through[index - 1], maps.apply(M, S0), 0) + U
        return jnp.where(index > 0, first, S0), kept

    def _stepped_back(self, maps: Maps, kept: Any, passes: Array, G: Array) -> Array:
        throughs, through = [], passes
        for hop in self._hops():
            throughs.append(through)
            through = self._longer(through, hop)
        X = self._sent(G, -1)
        for hop, M, through in reversed(list(zip(self._hops(), kept, throughs, strict=True))):
            reached = through & (jnp.arange(self.count) >= hop)
            X = X + self._sent(jnp.where(reached[self.index], maps.transposed(M, X), 0), -hop)
        return X

    def _longer(self, through: Array, hop: int) -> Array:
        """[shards] whether twice as many shards are gone through, the last of them the shard's own."""
        return through & jnp.where(jnp.arange(self.count) >= hop, jnp.roll(through, hop), True)

    def _hops(self) -> list[int]:
        return [1 << step for step in range((self.count - 1).bit_length())]

    def _sent(self, tree: Any, hop: int) -> Any:
        """What the shard `hop` before sends; zeros where there is none."""
        place = lambda shard: self.count - 1 - shard if self.reverse else shard
        pairs = [(place(i), place(i + hop)) for i in range(self.count) if 0 <= i + hop < self.count]
        return _as_one(lambda flat: lax.ppermute(flat, self.axis, pairs), tree)

    def _all(self, tree: Any) -> Any:
        """[shards, ...] of every shard, in order."""
        in_order = lambda x: x[::-1] if self.reverse else x
        # Along an axis of one that is there: JAX gives a new axis the explicit sharding of the one that it comes before.
        return jax.tree.map(in_order, _as_one(lambda each: lax.all_gather(each[None], self.axis, tiled=True), tree))


def axis_size(axis: Any) -> int:
    """How many shards a mesh axis has; ValueError where there is no such axis around the call."""
    if not isinstance(axis, str):
        raise ValueError(f"sequence_axis must be the name of a mesh axis, or None; got {axis!r}.")
    try:
        return int(lax.axis_size(axis))
    except NameError:
        there = tuple(jax.sharding.get_abstract_mesh().manual_axes)
        found = f"here these are {', '.join(map(repr, there))}" if there else "there is none here"
        raise ValueError(
            f"sequence_axis={axis!r} must name a mesh axis that jax.shard_map around this call splits over; {found}. Call the "
            f"operation inside jax.shard_map with a mesh that has the axis and time split over it, or leave sequence_axis away "
            f"where each call has whole sequences."
        ) from None


def _as_one(send: Callable[[Array], Array], tree: Any) -> Any:
    """One message for all arrays [b, H, ...] of a pytree; what comes may have one more axis, in front.

    Its first axes are theirs, so that batch and heads stay split where `jax.shard_map` leaves them to the partitioner.
    """
    leaves, structure = jax.tree.flatten(tree)
    sizes = [math.prod(x.shape[2:]) for x in leaves]
    sent = send(jnp.concatenate([x.reshape(*x.shape[:2], n) for x, n in zip(leaves, sizes, strict=True)], -1))
    parts, start = [], 0
    for x, n in zip(leaves, sizes, strict=True):
        parts.append(sent[..., start : start + n].reshape(*sent.shape[:-1], *x.shape[2:]))
        start += n
    return jax.tree.unflatten(structure, parts)
