"""The gated delta rule: DeltaNet, gated DeltaNet and Kimi delta attention by one call for every device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from ejkernel._checking import ValueCheck
from ejkernel._sizes import unknown_sizes
from ejkernel.kernels._delta import GATED_DELTA_RULE, GatedDeltaRuleConfig
from ejkernel.modules.base import default_executor
from ejkernel.modules.operations._recurrence_kernel import RecurrenceKernel
from ejkernel.modules.operations._results import OutputAndState
from ejkernel.modules.operations._value_checks import beta_check, has_values

__all__ = ["GatedDeltaRule", "GatedDeltaRuleConfig", "gated_delta_rule"]


class GatedDeltaRule(RecurrenceKernel):
    """`gated_delta_rule` as the executor sees it."""

    signature = GATED_DELTA_RULE
    per_token = ("query", "key", "value", "beta", "g")
    gates = ("g",)
    order = " The order here is query, key, value, beta, g."

    def value_checks(self, named: Mapping[str, Any]) -> Iterator[ValueCheck]:
        yield from super().value_checks(named)
        if has_values(named["beta"]) and not unknown_sizes(named):
            yield beta_check(named["beta"])

    def drawn(self, named: dict[str, Any]) -> dict[str, Any]:
        """Keys of length 1 and beta from 0 to 1, as layers have them. Others amplify without bound."""
        beta = jax.nn.sigmoid(named["beta"].astype(jnp.float32)).astype(named["beta"].dtype)
        return {**named, "query": _unit(named["query"]), "key": _unit(named["key"]), "beta": beta}


def _unit(x: Array) -> Array:
    lengths: Array = jnp.linalg.norm(x.astype(jnp.float32), axis=-1, keepdims=True)
    return (x / lengths).astype(x.dtype)


@GatedDeltaRule.called_by_users
def gated_delta_rule(
    query: Float[Array, "*batch T Hk K"],
    key: Float[Array, "*batch T Hk K"],
    value: Float[Array, "*batch T H V"],
    beta: Float[Array, "*batch T H"],
    g: Float[Array, "*batch T H"] | Float[Array, "*batch T H K"] | None = None,
    initial_state: Float[Array, "N H K V"] | Float[Array, "H K V"] | None = None,
    cu_seqlens: Int[Array, " N+1"] | None = None,
    *,
    use_qk_l2norm: bool = False,
    softmax_scale: float | Float[Array, ""] | None = None,
    reverse: bool = False,
    return_state: bool = False,
    sequence_axis: str | None = None,
    platform: str | None = None,
    cfg: GatedDeltaRuleConfig | None = None,
) -> Float[Array, "*batch T H V"] | OutputAndState:
    """The delta rule: a token writes the error of what the state predicts for its key, not the value itself.

        h' = exp(g_t) h_{t-1};   e_t = v_t - k_t h';   h_t = h' + beta_t k_t^T e_t;   o_t = softmax_scale * q_t h_t

    Without `g` it is DeltaNet, with one gate per head gated DeltaNet, with one per key channel Kimi delta attention. Decays are
    only ever multiplied, so gates of -1e4 and -inf are exact like any other, in the result and in every gradient.

    Args:
        query: `[B, T, Hk, K]`, or `[tokens, Hk, K]` when packed by `cu_seqlens`.
        key: `[B, T, Hk, K]`; its rows should have length 1 (`use_qk_l2norm`), or the rule may amplify what it reads.
        value: `[B, T, H, V]`; `Hk` divides `H`, and value head h reads key head `h // (H // Hk)`.
        beta: how much of the error is written, `[B, T, H]`; usually 0 to 1, or 0 to 2.
        g: log decay `[B, T, H]` of a head's whole state, or `[B, T, H, K]` of row k; 0 keeps, -inf forgets.
        initial_state: the state before the first step, `[N, H, K, V]`; N is the batch, or the number of packed sequences.
        cu_seqlens: `[N + 1]` offsets, 0 to the number of tokens, that pack N sequences in one row; then B is 1, or left out.
        use_qk_l2norm: divide the rows of query and key by `sqrt(sum of squares + 1e-6)` first.
        softmax_scale: factor of the output; None means `K ** -0.5`. Each new number compiles again; an array
            (`jnp.float32(x)`) does not.
        reverse: run from the last token to the first.
        return_state: also return the state after the last step.
        sequence_axis: inside `jax.shard_map`, the mesh axis that time is split over. Each shard passes its own tokens. Together
            the results are those of the whole sequence ("Several devices" in the documentation).
        platform: `"xla"`, `"triton"` or `"pallas"`; `"auto"` or None takes the best that supports the call here.
        cfg: an explicit configuration, used as given.

    Returns:
        The output `[B, T, H, V]` in query's dtype; with `return_state`, also the final state `[N, H, K, V]` in float32
        (float64 for float64).

    Example:
        >>> q, k = (jax.random.normal(jax.random.key(i), (2, 100, 2, 16)) for i in range(2))
        >>> v = jax.random.normal(jax.random.key(2), (2, 100, 4, 8))
        >>> beta = jax.nn.sigmoid(jax.random.normal(jax.random.key(3), (2, 100, 4)))
        >>> gate = jax.nn.log_sigmoid(jax.random.normal(jax.random.key(4), (2, 100, 4)))
        >>> out, state = gated_delta_rule(q, k, v, beta, gate, use_qk_l2norm=True, return_state=True)
        >>> out.shape, state.shape
        ((2, 100, 4, 8), (2, 4, 16, 8))
    """
    return default_executor()(
        GatedDeltaRule(), query, key, value, beta, g, initial_state, cu_seqlens, use_qk_l2norm=use_qk_l2norm,
        softmax_scale=softmax_scale, reverse=reverse, return_state=return_state, sequence_axis=sequence_axis,
        platform=platform, _cfg=cfg,
    )  # fmt: skip
