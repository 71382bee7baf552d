"""The one definition of a linear-attention call: h_t = D_t(h_{t-1}) + k_t^T v_t, o_t = scale * q_t h_t.

`LinearProblem.from_arguments` checks, completes and merges what a user may pass; every platform takes the result and
nothing else. What is settled here, once:

- packed input of rank 3 becomes rank 4 with a batch of one (`finish` undoes it on the output);
- a `g` of rank 4 decays rows of the state, so it is added to `gk`; a `g` of rank 3 stays (the fast path for scalars);
- `g_gamma` is `[N, H]`, `initial_state` is `[N, H, K, V]` in the state's dtype, or None;
- the scale is a number. A traced scale is applied to the output afterwards (`finish`), so that no platform sees it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel._device import Device, device_of
from ejkernel.kernels._linear import axes, checks
from ejkernel.kernels._linear.gates import ARGUMENTS

DIFFERENTIABLE = ("query", "key", "value", *ARGUMENTS, "initial_state")
EMPTY = "empty"  # the route of a call that computes nothing
DECODED_TOKENS = 16  # the most that a call of a decoder has: one, or a few that are verified together


class RecurrenceProblem:
    """What checked calls of all recurrences have in common. Arrays are leaves; static fields belong to the tree's structure.

    B is the batch, T the number of tokens in a row, N the number of sequences: B, or the packed ones (then B is 1). The fields
    stand in each problem itself, since their order is that of the keys under which configurations are stored.
    """

    query: jax.Array
    initial_state: jax.Array | None
    cu_seqlens: jax.Array | None
    traced_scale: jax.Array | None
    packed_rank3: bool

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """(B, T, H, K, V)."""
        raise NotImplementedError

    @property
    def sequences(self) -> int:
        """N: the batch, or the number of packed sequences."""
        return self.query.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @property
    def state_dtype(self) -> np.dtype:
        return state_dtype(self.query)

    @property
    def output_dtype(self) -> np.dtype:
        """What a platform writes: query's dtype, or the state's when a traced scale is still to be applied."""
        return self.query.dtype if self.traced_scale is None else self.state_dtype

    @property
    def empty(self) -> bool:
        """Whether there are no tokens, so that nothing is computed. A number that is not known is not 0."""
        return any(isinstance(size, int) and size == 0 for size in self.shape[:2])

    def of_no_tokens(self) -> tuple[jax.Array, jax.Array]:
        """(output, final state) of an empty call."""
        (B, T, H, K, V), state = self.shape, self.initial_state
        final = jnp.zeros((self.sequences, H, K, V), self.state_dtype) if state is None else state
        return jnp.zeros((B, T, H, V), self.output_dtype), final

    def finish(self, output: jax.Array) -> jax.Array:
        """A platform's output `[B, T, H, V]` as the user gets it: scaled if the scale was traced, in the rank that came."""
        if self.traced_scale is not None:
            output = (output * self.traced_scale.astype(output.dtype)).astype(self.query.dtype)
        return output[0] if self.packed_rank3 else output


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LinearProblem(RecurrenceProblem):
    """A checked call of linear attention."""

    query: jax.Array  # [B, T, H, K]
    key: jax.Array  # [B, T, Hkv, K]
    value: jax.Array  # [B, T, Hkv, V]
    g: jax.Array | None = None  # [B, T, H | Hkv]         log decay of the whole state
    g_gamma: jax.Array | None = None  # [N, H]            the same at every step
    gk: jax.Array | None = None  # [B, T, H | Hkv, K]     log decay of row k
    gv: jax.Array | None = None  # [B, T, H | Hkv, V]     log decay of column v
    initial_state: jax.Array | None = None  # [N, H, K, V]
    cu_seqlens: jax.Array | None = None  # [N + 1]
    traced_scale: jax.Array | None = None  # []
    scale: float = dataclasses.field(default=1.0, metadata={"static": True})
    reverse: bool = dataclasses.field(default=False, metadata={"static": True})
    packed_rank3: bool = dataclasses.field(default=False, metadata={"static": True})
    device: Device = dataclasses.field(default_factory=lambda: device_of(()), metadata={"static": True})

    @classmethod
    def from_arguments(
        cls,
        query: Any,
        key: Any,
        value: Any,
        *,
        g: Any = None,
        g_gamma: Any = None,
        gk: Any = None,
        gv: Any = None,
        initial_state: Any = None,
        cu_seqlens: Any = None,
        softmax_scale: Any = None,
        reverse: bool = False,
    ) -> LinearProblem:
        """Checks every argument against the contract; ValueError or TypeError names the one that is wrong."""
        q, k, v, packed_rank3 = checks.rows(query, key, value, cu_seqlens)
        checks.query_key_value(q, k, v)
        dims = checks.Dims.of(q, k, v, sequences=checks.sequences(cu_seqlens, q))
        g, gk = checks.gates(dims, g, gk, packed_rank3)
        return cls(
            query=q,
            key=k,
            value=v,
            g=g,
            g_gamma=checks.gamma(dims, g_gamma),
            gk=gk,
            gv=checks.channel_gate(dims, "gv", gv, packed_rank3),
            packed_rank3=packed_rank3,
            device=device_of((q, k, v)),
            **shared_fields(dims, q, initial_state, cu_seqlens, softmax_scale, reverse),
        )

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """(B, T, H, K, V)."""
        B, T, H, K = self.query.shape
        return B, T, H, K, self.value.shape[-1]

    @property
    def kv_heads(self) -> int:
        return self.key.shape[2]

    def splits(self) -> tuple[dict[str, tuple[str, ...]], tuple[tuple[str, ...], ...], tuple[str, ...], str]:
        """How a mesh may split the call: the axes of each array, those of output and state, which may be split, and advice."""
        roles = {name: axes.roles(name, self.cu_seqlens is not None) for name in (*DIFFERENTIABLE, "cu_seqlens")}
        return roles, (roles["value"], roles["initial_state"]), axes.FREE, axes.ADVICE

    @property
    def differentiable(self) -> dict[str, jax.Array]:
        """Those of the arrays with a gradient that are given."""
        given = {name: getattr(self, name) for name in DIFFERENTIABLE}
        return {name: x for name, x in given.items() if x is not None}


def shared_fields(
    dims: checks.Dims, q: jax.Array, initial_state: Any, cu_seqlens: Any, softmax_scale: Any, reverse: Any
) -> dict[str, Any]:
    """What every recurrence takes in the same way, checked, as fields of its problem."""
    scale, traced_scale = checks.scale(softmax_scale, dims.K)
    return {
        "initial_state": checks.initial_state(dims, initial_state, state_dtype(q)),
        "cu_seqlens": checks.cu_seqlens(cu_seqlens, q),
        "traced_scale": traced_scale,
        "scale": scale,
        "reverse": checks.flag("reverse", reverse),
    }


def state_dtype(query: jax.Array) -> np.dtype:
    """States and sums are kept in float32, and in float64 for float64 queries."""
    return np.dtype(np.float64) if query.dtype == jnp.float64 else np.dtype(np.float32)
