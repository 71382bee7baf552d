"""A recurrence whose time is split over a mesh axis: each shard computes its own tokens, and only states travel.

Forward: a shard's summary (what its tokens make of the state that comes in), the exchange, then the shard's own call from the
state that came. Backward: the adjoint of that state as far as it is the shard's own, the exchange of adjoints in the other
direction, then the gradient of the shard's own call from the adjoint that came. Summaries are never differentiated.

Packed: at a shard's edge at most one sequence goes on. Sequences that start in a shard start from their own initial state.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel._kept import RECURRENCE_OUTPUT, RECURRENCE_STATES, named
from ejkernel._meshes import explicit_mesh
from ejkernel._reverse_only import Refusals, differentiable_once, not_differentiable
from ejkernel._varying import vary, varying_axes
from ejkernel.kernels._linear.problem import RecurrenceProblem
from ejkernel.parallel.exchange import Maps, Shards

Array = jax.Array
Arrays = dict[str, Array]
REFUSALS = Refusals(
    "forward-mode differentiation (jax.jvp, jax.jacfwd, jax.linearize) of a call with sequence_axis does not exist: where time "
    "is split there is reverse mode only. Leave sequence_axis away and gather time, on platform='xla'.",
    "the gradient of a gradient of a call with sequence_axis does not exist. Leave sequence_axis away and gather time, on "
    "platform='xla'.",
)


class Places:
    """Where a shard lies among packed sequences; all in the order in which the recurrence goes.

    Attributes:
        begins, ends: [N] whether a sequence's first, or last, step is in this shard. Empty sequences are the first shard's.
        enters, leaves: the sequence that comes from the shard before, and that goes on in the next.
        entered, left: whether there is one.
        passes: [shards] whether one sequence fills the shard and goes on beyond both of its ends.
    """

    def __init__(self, shards: Shards, offsets: Array, tokens: int):
        starts, stops = offsets[:-1], offsets[1:]
        place = lax.axis_index(shards.axis).astype(offsets.dtype)
        low = place * tokens
        high = low + tokens
        empty = starts == stops
        first, last = (stops - 1, starts) if shards.reverse else (starts, stops - 1)
        holds = lambda token: jnp.where(empty, place == 0, (token >= low) & (token < high))
        self.begins, self.ends = holds(first), holds(last)
        edges = jnp.arange(shards.count + 1, dtype=offsets.dtype) * tokens
        crossing = (starts[None] < edges[:, None]) & (edges[:, None] < stops[None])  # [shards + 1, N]
        through = jnp.any(crossing[:-1] & crossing[1:], 1)
        self.passes = through[::-1] if shards.reverse else through
        before, after = (high, low) if shards.reverse else (low, high)
        self.entered, self.enters = _crossing(starts, stops, before)
        self.left, self.leaves = _crossing(starts, stops, after)
        position = low + jnp.arange(tokens, dtype=offsets.dtype)
        inside = lambda there, n: there & (position >= starts[n]) & (position < stops[n])
        self.of_entering, self.of_leaving = inside(self.entered, self.enters), inside(self.left, self.leaves)  # [T]
        self.local = jnp.clip(offsets - low, 0, tokens)


def _crossing(starts: Array, stops: Array, edge: Array) -> tuple[Array, Array]:
    found = (starts < edge) & (edge < stops)
    return jnp.any(found), jnp.argmax(found)


class Family(Protocol):
    """What the exchange needs of a family. `arrays`: those of a call that have a gradient, with initial states."""

    @property
    def maps(self) -> Maps:
        """What its M are."""

    def solve(self, arrays: Arrays, local: Array | None) -> tuple[Array, Array]:
        """(output, final states) of the shard's own call."""

    def summary(self, arrays: Arrays, places: Places | None) -> tuple[Array, Any, Any]:
        """(U, M, what else of the summary to keep). Packed: U of the sequence that leaves, and M of the one that enters."""

    def corrected(self, kept: Any, S: Array, places: Places | None) -> tuple[Array, Array] | None:
        """What `solve` would give from the state S that came in, where the summary made it on its way; None elsewhere."""

    def for_adjoint(self, kept: Any) -> Any:
        """What `own_adjoint` needs of the summary."""

    def own_adjoint(self, arrays: Arrays, kept: Any, doutput: Array, places: Places | None) -> Array:
        """The adjoint of the state that comes in, through the outputs of this shard."""


def solve_split(
    problem: RecurrenceProblem,
    arrays: Arrays,
    offsets: Array | None,
    shards: Shards,
    family: Family,
) -> tuple[Array, Array]:
    """(output of the shard's tokens, final state of the whole sequences, the same on all shards).

    Args:
        problem: the shard's own call.
        arrays: those of its arrays that have a gradient, with an initial state.
        offsets: of packed sequences, in the whole row.
    """
    axes = varying_axes(*arrays.values(), lax.axis_index(shards.axis), *(() if offsets is None else (offsets,)))
    arrays = {name: vary(x, axes) for name, x in arrays.items()}
    split = _Split(shards, family, problem.query.shape[1])
    run = jax.custom_vjp(lambda arrays, offsets: split.forward(False, arrays, offsets)[0])
    run.defvjp(
        lambda arrays, offsets: split.forward(True, not_differentiable(arrays, REFUSALS), offsets),
        lambda kept, d: split.backward(kept, *not_differentiable(d, REFUSALS)),
    )
    output, final = run(differentiable_once(arrays, REFUSALS), None if offsets is None else vary(offsets, axes))
    # Outside of what has a gradient of its own: `jax.shard_map` with and without its checks then hands every shard the whole
    # cotangent of the sum.
    return output, lax.psum(final, shards.axis)


@dataclasses.dataclass(frozen=True)
class _Split:
    """One shard's part of a call, forward and backward."""

    shards: Shards
    family: Family
    tokens: int

    def places(self, offsets: Array | None) -> Places | None:
        return None if offsets is None else Places(self.shards, offsets, self.tokens)

    def forward(self, keep: bool, arrays: Arrays, offsets: Array | None) -> Any:
        """((output, final states of those sequences that end here), what `backward` starts from)."""
        shards, family, places = self.shards, self.family, self.places(offsets)
        U, M, kept = family.summary(arrays, places)
        first = arrays["initial_state"] if places is None else jnp.zeros_like(U)
        S, maps = shards.incoming(family.maps, U, M, _passes(shards, places), first)
        for_adjoint = family.for_adjoint(kept)
        if keep:  # before anything is made of it: what a policy keeps is not computed again for what comes later
            S, M, maps, for_adjoint = named(RECURRENCE_STATES, (S, M, maps, for_adjoint))
        found, pull = family.corrected(kept, S, places), None
        if found is None:
            solve = lambda arrays: family.solve(arrays, None if places is None else places.local)
            given = _from(arrays, S, places)
            # With explicit axes JAX cannot hand on what a gradient starts from: `backward` computes it again.
            again = not keep or explicit_mesh(*arrays.values()) is not None
            found, pull = (solve(given), None) if again else jax.vjp(solve, given)
        output, final = found
        if keep:
            output, final = named(RECURRENCE_OUTPUT, output), named(RECURRENCE_STATES, final)
        ends = shards.index == shards.count - 1 if places is None else places.ends[:, None, None, None]
        return (output, jnp.where(ends, final, 0)), (arrays, offsets, S, M, for_adjoint, maps, pull)

    def backward(self, residuals: Any, doutput: Array, dfinal: Array) -> Any:
        """dfinal: of the whole sequences, the same on all shards."""
        arrays, offsets, S, M, kept, maps, pull = residuals
        shards, family, places = self.shards, self.family, self.places(offsets)
        G = family.own_adjoint(arrays, kept, doutput, places)
        if places is None:
            begins, ends = shards.index == 0, shards.index == shards.count - 1
            stops, stopping = ends, dfinal
        else:
            begins, ends = (x[:, None, None, None] for x in (places.begins, places.ends))
            stops, stopping = places.entered & places.ends[places.enters], dfinal[places.enters][None]
        G = G + jnp.where(stops, family.maps.transposed(M, stopping), 0)
        X = shards.outgoing_adjoint(family.maps, maps, _passes(shards, places), G)
        if places is not None:
            X = jnp.where(_is(places.leaves, places.left, dfinal.shape[0]), X, 0)
        if pull is None:
            solve = lambda arrays: family.solve(arrays, None if places is None else places.local)
            pull = jax.vjp(solve, _from(arrays, S, places))[1]
        (grads,) = pull((doutput, jnp.where(ends, dfinal, X)))
        grads["initial_state"] = jnp.where(begins, grads["initial_state"], 0)
        return grads, None if offsets is None else np.zeros(offsets.shape, jax.dtypes.float0)


def _passes(shards: Shards, places: Places | None) -> Array:
    return jnp.ones(shards.count, bool) if places is None else places.passes


def _is(sequence: Array, there: Array, count: int) -> Array:
    """[N, 1, 1, 1]: which of the sequences it is, if it is there."""
    return (there & (jnp.arange(count) == sequence))[:, None, None, None]


def _from(arrays: Arrays, S: Array, places: Places | None) -> Arrays:
    """The arrays with the states that the shard's own sequences start from."""
    if places is None:
        return {**arrays, "initial_state": S}
    given = arrays["initial_state"]
    enters = _is(places.enters, places.entered, given.shape[0])
    begins = places.begins[:, None, None, None]
    return {**arrays, "initial_state": jnp.where(begins, given, jnp.where(enters, S, 0))}


def with_state(problem: Any) -> Any:
    """The problem with an initial state, zeros where none was given; scale and rank of the output are left for later."""
    _, _, H, K, V = problem.shape
    state = problem.initial_state
    if state is None:
        state = jnp.zeros((problem.sequences, H, K, V), problem.state_dtype)
    return dataclasses.replace(problem, initial_state=state, traced_scale=None, packed_rank3=False)
