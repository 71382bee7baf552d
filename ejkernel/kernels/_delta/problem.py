"""The one definition of a call of the delta rule:

    h' = D_t(h_{t-1});   e_t = v_t - k_t h';   h_t = h' + beta_t k_t^T e_t;   o_t = scale * q_t h_t

`DeltaProblem.from_arguments` checks and completes what a user may pass; every platform takes the result and nothing else.
What is settled here, once:

- packed input of rank 3 becomes rank 4 with a batch of one (`finish` undoes it on the output);
- `g` of rank 3 decays a value head's whole state, of rank 4 its rows; there is one gate or none;
- `initial_state` is `[N, H, K, V]` in the state's dtype, or None;
- the scale is a number. A traced scale is applied to the output afterwards (`finish`), so that no platform sees it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ejkernel._device import Device, device_of
from ejkernel.kernels._delta import checks
from ejkernel.kernels._linear import checks as shared
from ejkernel.kernels._linear.problem import RecurrenceProblem, shared_fields

EPSILON = 1e-6  # of use_qk_l2norm


def normalised(rows: jax.Array) -> jax.Array:
    """Rows divided by their lengths."""
    return rows * lax.rsqrt(jnp.sum(rows * rows, -1, keepdims=True) + EPSILON)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeltaProblem(RecurrenceProblem):
    """A checked call of the delta rule: value head h reads head h // (H / Hk) of query and key."""

    query: jax.Array  # [B, T, Hk, K]
    key: jax.Array  # [B, T, Hk, K]
    value: jax.Array  # [B, T, H, V]
    beta: jax.Array  # [B, T, H]
    g: jax.Array | None = None  # [B, T, H] or [B, T, H, K]      log decay of the whole state, or of row k
    initial_state: jax.Array | None = None  # [N, H, K, V]
    cu_seqlens: jax.Array | None = None  # [N + 1]
    traced_scale: jax.Array | None = None  # []
    scale: float = dataclasses.field(default=1.0, metadata={"static": True})
    reverse: bool = dataclasses.field(default=False, metadata={"static": True})
    use_qk_l2norm: bool = dataclasses.field(default=False, metadata={"static": True})
    packed_rank3: bool = dataclasses.field(default=False, metadata={"static": True})
    device: Device = dataclasses.field(default_factory=lambda: device_of(()), metadata={"static": True})

    @classmethod
    def from_arguments(
        cls,
        query: Any,
        key: Any,
        value: Any,
        beta: Any,
        g: Any = None,
        softmax_scale: Any = None,
        initial_state: Any = None,
        reverse: Any = False,
        cu_seqlens: Any = None,
        *,
        use_qk_l2norm: Any = False,
    ) -> DeltaProblem:
        """The gated delta rule, its arguments in the order of the documents; an error names the one that is wrong."""
        q, k, v, packed_rank3 = shared.rows(query, key, value, cu_seqlens)
        checks.query_key_value(q, k, v)
        dims = checks.dims_of(q, v, sequences=shared.sequences(cu_seqlens, q))
        return cls(
            query=q,
            key=k,
            value=v,
            beta=checks.beta(dims, beta, packed_rank3),
            g=checks.gate(dims, g, packed_rank3),
            use_qk_l2norm=shared.flag("use_qk_l2norm", use_qk_l2norm),
            packed_rank3=packed_rank3,
            device=device_of((q, k, v)),
            **shared_fields(dims, q, initial_state, cu_seqlens, softmax_scale, reverse),
        )

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """(B, T, H, K, V); H counts value heads."""
        (B, T, _, K), (H, V) = self.query.shape, self.value.shape[2:]
        return B, T, H, K, V

    @property
    def key_heads(self) -> int:
        """Hk: the heads of query and key."""
        return self.query.shape[2]

    @property
    def per_channel(self) -> bool:
        """Whether the gate decays each key channel by itself."""
        return self.g is not None and self.g.ndim == 4

    @property
    def differentiable(self) -> dict[str, jax.Array]:
        """Those of the arrays with a gradient that are given, by the names of linear attention: a gate per channel is gk."""
        names = {"query": "query", "key": "key", "value": "value", "beta": "beta", "initial_state": "initial_state"}
        names["gk" if self.per_channel else "g"] = "g"
        given = {name: getattr(self, field) for name, field in names.items()}
        return {name: x for name, x in given.items() if x is not None}

    def normalised(self) -> DeltaProblem:
        """The same call with query and key divided by their lengths here, if it asks for that, in their own dtype."""
        if not self.use_qk_l2norm:
            return self
        q, k = (normalised(x.astype(self.state_dtype)).astype(x.dtype) for x in (self.query, self.key))
        return dataclasses.replace(self, query=q, key=k, use_qk_l2norm=False)
