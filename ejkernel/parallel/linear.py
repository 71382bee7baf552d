"""What a shard of a linear operation makes of the state that comes in: S_out = m S_in n + U, decays m of rows and n of columns.

U and the adjoint of S_in are one matrix product each over the shard's tokens. Its rows are weighted by the decays between them
and the shard's edge. Log decays are only ever added up towards the edge, never subtracted, so strong gates lose no digits and
-inf gives a weight of 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel._search import how_many_up_to
from ejkernel.kernels._linear import LinearProblem
from ejkernel.parallel.sequence import Arrays, Places

Array = jax.Array


class Decays(NamedTuple):
    """M of a linear operation."""

    rows: Array  # [b, H, K | 1]
    columns: Array  # [b, H, V | 1]

    def times(self, S: Array) -> Array:
        return _finite(self.rows)[..., :, None] * S * _finite(self.columns)[..., None, :]


def _finite(x: Array) -> Array:
    """At most the largest number: gates above 0 may overflow over a shard, and inf times what is 0 would be NaN."""
    largest = jnp.finfo(x.dtype).max
    return jnp.clip(x, -largest, largest)


def _weighted(x: Array, logs: Array | None) -> Array:
    """x exp(logs), finite wherever x is a number."""
    return x if logs is None else _finite(x * _finite(jnp.exp(logs)))


class DecayMaps:
    """How decays act on states; each is its own transpose."""

    def apply(self, M: Decays, S: Array) -> Array:
        return M.times(S)

    def transposed(self, M: Decays, S: Array) -> Array:
        return M.times(S)

    def composed(self, after: Decays, before: Decays) -> Decays:
        return Decays(after.rows * before.rows, after.columns * before.columns)


@dataclasses.dataclass(frozen=True)
class LinearShard:
    """One shard's call of a linear operation; its arrays are shapes."""

    problem: LinearProblem
    solved: Callable[[LinearProblem], tuple[Array, Array]]
    maps = DecayMaps()

    def solve(self, arrays: Arrays, local: Array | None) -> tuple[Array, Array]:
        given: dict[str, Any] = {**arrays, "cu_seqlens": local}
        return self.solved(dataclasses.replace(self.problem, **given))

    def corrected(self, kept: Any, S: Array, places: Places | None) -> None:
        return None

    def summary(self, arrays: Arrays, places: Places | None) -> tuple[Array, Decays, None]:
        rows, columns = self._logs(arrays, places)
        leaving = None if places is None else places.of_leaving
        entering = None if places is None else places.of_entering
        U = self._product(arrays["key"], arrays["value"], self._towards_end(rows), self._towards_end(columns), leaving)
        one = 1 + jnp.sum(arrays["query"][:, :0, :, :1].astype(self.problem.state_dtype), 1)  # [B, H, 1]; varies like all else
        M = self._decays(rows, columns, entering, one)
        if places is not None:
            whole = self._decays(rows, columns, leaving, one)
            starts = places.left & places.begins[places.leaves]
            U = U + jnp.where(starts, whole.times(arrays["initial_state"][places.leaves][None]), 0)
        return U, M, None

    def for_adjoint(self, kept: None) -> None:
        return None

    def own_adjoint(self, arrays: Arrays, kept: None, doutput: Array, places: Places | None) -> Array:
        rows, columns = self._logs(arrays, places)
        entering = None if places is None else places.of_entering
        before = self._from_start(rows), self._from_start(columns)
        return self.problem.scale * self._product(arrays["query"], doutput, before[0], before[1], entering)

    def _logs(self, arrays: Arrays, places: Places | None) -> tuple[Array | None, Array | None]:
        """Log decays of rows [B, T, Hkv, groups | 1, K | 1] and of columns, in the state's dtype; None: no decay."""
        rows = [self._grouped(arrays[name]) for name in ("gk",) if name in arrays]
        if "g" in arrays:
            rows.append(self._grouped(arrays["g"][..., None]))
        if "g_gamma" in arrays:
            gamma, T = arrays["g_gamma"], self.problem.shape[1]
            if places is None:
                steps = jnp.broadcast_to(gamma[:, None], (gamma.shape[0], T, gamma.shape[1]))
            else:
                owner = how_many_up_to(places.local, jnp.arange(T, dtype=places.local.dtype)) - 1
                steps = gamma[jnp.clip(owner, 0, gamma.shape[0] - 1)][None]
            rows.append(self._grouped(steps[..., None]))
        columns = self._grouped(arrays["gv"]) if "gv" in arrays else None
        return (sum(rows[1:], rows[0]) if rows else None), columns

    def _grouped(self, x: Array) -> Array:
        """[B, T, heads, ...] by groups: [B, T, Hkv, heads of a group, ...]."""
        B, T, heads = x.shape[:3]
        kv_heads = self.problem.kv_heads
        return x.reshape(B, T, kv_heads, heads // kv_heads, *x.shape[3:]).astype(self.problem.state_dtype)

    def _towards_end(self, logs: Array | None) -> Array | None:
        """The sum over the steps after each, to the shard's last."""
        if logs is None:
            return None
        none = jnp.zeros_like(logs[:, :1])
        if self.problem.reverse:
            return lax.cumsum(jnp.concatenate([none, logs[:, :-1]], 1), 1) if logs.shape[1] else logs
        return lax.cumsum(jnp.concatenate([logs[:, 1:], none], 1), 1, reverse=True) if logs.shape[1] else logs

    def _from_start(self, logs: Array | None) -> Array | None:
        """The sum over the shard's steps up to each, its own included."""
        return None if logs is None else lax.cumsum(logs, 1, reverse=self.problem.reverse)

    def _decays(self, rows: Array | None, columns: Array | None, tokens: Array | None, one: Array) -> Decays:
        """The decays of all steps, or of those of some tokens [T]; `one` where there are none."""
        _, _, H, _, _ = self.problem.shape
        B, kv_heads = self.problem.query.shape[0], self.problem.kv_heads

        def total(logs: Array | None) -> Array:
            if logs is None:
                return one
            logs = logs if tokens is None else jnp.where(tokens[None, :, None, None, None], logs, 0)
            found = jnp.exp(jnp.sum(logs, 1))  # [B, Hkv, groups | 1, channels | 1]
            return jnp.broadcast_to(found, (B, kv_heads, H // kv_heads, found.shape[-1])).reshape(B, H, found.shape[-1])

        return Decays(total(rows), total(columns))

    def _product(self, x: Array, y: Array, rows: Array | None, columns: Array | None, tokens: Array | None) -> Array:
        """[B, H, K, V]: the sum over tokens of (x exp(rows))^T (y exp(columns))."""
        B, _, H, K, V = self.problem.shape
        x, y = _weighted(self._grouped(x), rows), _weighted(self._grouped(y), columns)
        if tokens is not None:
            x, y = (jnp.where(tokens[None, :, None, None, None], z, 0) for z in (x, y))
        operand = self._operand()
        found = jnp.einsum(
            "bthgk,bthgv->bhgkv", x.astype(operand), y.astype(operand), precision=lax.Precision.HIGHEST,
            preferred_element_type=self.problem.state_dtype,
        )  # fmt: skip
        return jnp.broadcast_to(found, (B, *found.shape[1:2], H // found.shape[1], K, V)).reshape(B, H, K, V)

    def _operand(self) -> Any:
        """As in the platforms' own products: bfloat16 as it is where the device multiplies such."""
        p = self.problem
        narrow = all(x.dtype == jnp.bfloat16 for x in (p.query, p.key, p.value)) and p.device.backend != "cpu"
        return jnp.bfloat16 if narrow else p.state_dtype
