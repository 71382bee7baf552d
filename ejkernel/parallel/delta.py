"""What a shard of the delta rule makes of the state that comes in: S_out = M S_in + U with a matrix M [K, K].

[U | M] is the state recurrence itself, run with the values [v | 0] from the state [0 | I]: its outputs [o | A] are those
without, and per row of, the state that comes in. So one call of the platform's own kernels with V + K value channels gives the
shard's whole map, and o + A S_in its outputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ejkernel.kernels._delta import DeltaProblem
from ejkernel.parallel.sequence import Arrays, Places

Array = jax.Array


class MatrixMaps:
    """Matrices [b, H, K, K] that act on states."""

    def apply(self, M: Array, S: Array) -> Array:
        return jnp.matmul(M, S, precision=lax.Precision.HIGHEST)

    def transposed(self, M: Array, S: Array) -> Array:
        return jnp.matmul(M.mT, S, precision=lax.Precision.HIGHEST)

    def composed(self, after: Array, before: Array) -> Array:
        return jnp.matmul(after, before, precision=lax.Precision.HIGHEST)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Unrounded(DeltaProblem):
    """A call whose outputs are terms of a sum: they stay in the state's dtype."""

    @property
    def output_dtype(self) -> np.dtype:
        return self.state_dtype

    def finish(self, output: Array) -> Array:
        return output


class Kept(NamedTuple):
    """Of a shard's call without the state that comes in, in the state's dtype."""

    output: Array  # [B, T, H, V]
    readers: Array  # A [B, T, H, K]: what each output reads of the state that comes in
    final: Array  # [N, H, K, V]
    final_maps: Array  # [N, H, K, K]


@dataclasses.dataclass(frozen=True)
class DeltaShard:
    """One shard's call of the delta rule; its arrays are shapes."""

    problem: DeltaProblem
    solved: Callable[[DeltaProblem], tuple[Array, Array]]
    fits: Callable[[DeltaProblem], bool]
    maps = MatrixMaps()

    def solve(self, arrays: Arrays, local: Array | None) -> tuple[Array, Array]:
        return self.solved(self._call(arrays, local))

    def _call(self, arrays: Arrays, local: Array | None) -> DeltaProblem:
        named: dict[str, Any] = {("g" if name == "gk" else name): x for name, x in arrays.items()}
        return dataclasses.replace(self.problem, **named, cu_seqlens=local)

    def _unrounded(self, arrays: Arrays, local: Array | None) -> Unrounded:
        call = self._call(arrays, local)
        return Unrounded(**{field.name: getattr(call, field.name) for field in dataclasses.fields(call)})

    def summary(self, arrays: Arrays, places: Places | None) -> tuple[Array, Array, Kept]:
        made = self._from_nothing(arrays, places)
        if places is None:
            return made.final, made.final_maps, made
        return made.final[places.leaves][None], made.final_maps[places.enters][None], made

    def _from_nothing(self, arrays: Arrays, places: Places | None) -> Kept:
        """The shard's call where the state that comes in is zero, and the map of that state."""
        v, state = arrays["value"], arrays["initial_state"]
        K, V = arrays["key"].shape[-1], v.shape[-1]
        eye = jnp.broadcast_to(jnp.eye(K, dtype=state.dtype), (*state.shape[:-1], K)) + jnp.zeros_like(state[..., :1])
        if places is None:
            state, local = jnp.zeros_like(state), None
        else:
            begins = places.begins[:, None, None, None]
            state, eye, local = jnp.where(begins, state, 0), jnp.where(begins, 0, eye), places.local
        nothing = jnp.zeros_like(v, shape=(*v.shape[:-1], K)) + jnp.zeros_like(v[..., :1])
        join = lambda x, y: jnp.concatenate([x, y], -1)
        call = lambda value, state: self._unrounded({**arrays, "value": value, "initial_state": state}, local)
        if self.fits(both := call(join(v, nothing), join(state, eye))):
            output, final = self.solved(both)
            return Kept(output[..., :V], output[..., V:], final[..., :V], final[..., V:])
        output, final = self.solved(call(v, state))
        readers, maps = self.solved(call(nothing, eye))
        return Kept(output, readers, final, maps)

    def corrected(self, kept: Kept, S: Array, places: Places | None) -> tuple[Array, Array]:
        read = self._read(kept.readers, S)
        more = self.maps.apply(kept.final_maps, S)  # S: [B, ...], or [1, ...] for the one that enters
        if places is not None:
            read = jnp.where(places.of_entering[None, :, None, None], read, 0)
            enters = places.entered & (jnp.arange(more.shape[0]) == places.enters)
            more = jnp.where(enters[:, None, None, None], more, 0)
        return (kept.output + read).astype(self.problem.output_dtype), kept.final + more

    def _read(self, readers: Array, S: Array) -> Array:
        exact = lax.Precision.HIGHEST
        return jnp.einsum("bthk,bhkv->bthv", readers, S, precision=exact)

    def for_adjoint(self, kept: Kept) -> Array:
        return kept.readers

    def own_adjoint(self, arrays: Arrays, readers: Array, doutput: Array, places: Places | None) -> Array:
        if places is not None:  # both, since 0 times a NaN of another sequence is a NaN
            here = places.of_entering[None, :, None, None]
            readers, doutput = jnp.where(here, readers, 0), jnp.where(here, doutput, 0)
        exact: Any = lax.Precision.HIGHEST
        return jnp.einsum("bthk,bthv->bhkv", readers, doutput.astype(readers.dtype), precision=exact)
