"""The linear recurrence with every gate: plain linear attention, retention, simple GLA, GLA."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from ejkernel.kernels._linear.operations import RECURRENT
from ejkernel.modules.base import default_executor
from ejkernel.modules.operations._recurrence_kernel import RecurrenceKernel
from ejkernel.modules.operations._results import OutputAndState
from ejkernel.modules.operations.configs import RecurrentAttentionConfig

__all__ = ["RecurrentAttention", "RecurrentAttentionConfig", "recurrent_attention"]


class RecurrentAttention(RecurrenceKernel):
    """`recurrent_attention` as the executor sees it."""

    signature = RECURRENT


@RecurrentAttention.called_by_users
def recurrent_attention(
    query: Float[Array, "*batch T H K"],
    key: Float[Array, "*batch T Hkv K"],
    value: Float[Array, "*batch T Hkv V"],
    g: Float[Array, "*batch T heads"] | Float[Array, "*batch T heads K"] | None = None,
    g_gamma: Float[Array, " H"] | Float[Array, "N H"] | None = None,
    gk: Float[Array, "*batch T heads K"] | None = None,
    gv: Float[Array, "*batch T heads V"] | None = None,
    initial_state: Float[Array, "N H K V"] | Float[Array, "H K V"] | None = None,
    cu_seqlens: Int[Array, " N+1"] | None = None,
    *,
    softmax_scale: float | Float[Array, ""] | None = None,
    reverse: bool = False,
    return_state: bool = False,
    sequence_axis: str | None = None,
    platform: str | None = None,
    cfg: RecurrentAttentionConfig | None = None,
) -> Float[Array, "*batch T H V"] | OutputAndState:
    """Gated linear attention: h_t = decay_t * h_{t-1} + k_t^T v_t, o_t = softmax_scale * q_t h_t.

    The decay is the product of exp(gate) over the gates that are given. Gates are in log space: 0 keeps the state, -inf
    forgets it exactly. Any gates may be combined, and every array has its exact gradient.

    Args:
        query: `[B, T, H, K]`, or `[tokens, H, K]` when packed by `cu_seqlens`.
        key: `[B, T, Hkv, K]`; `Hkv` divides `H`, and head h reads kv head `h // (H // Hkv)`.
        value: `[B, T, Hkv, V]`.
        g: log decay `[B, T, H]` of a head's whole state, or `[B, T, H, K]` of row k. Gates may have `Hkv` heads.
        g_gamma: log decay of a head's whole state, the same at every step: `[H]`, `[1, H]` or `[N, H]`.
        gk: log decay of row k, `[B, T, H, K]`.
        gv: log decay of column v, `[B, T, H, V]`.
        initial_state: the state before the first step, `[N, H, K, V]`; N is the batch, or the number of packed sequences.
        cu_seqlens: `[N + 1]` offsets, 0 to the number of tokens, that pack N sequences in one row; then B is 1, or left out.
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
        >>> import jax, jax.numpy as jnp
        >>> q, k, v = (jax.random.normal(jax.random.key(i), (2, 100, 4, 16)) for i in range(3))
        >>> gate = jax.nn.log_sigmoid(jax.random.normal(jax.random.key(3), (2, 100, 4)))
        >>> out, state = recurrent_attention(q, k, v, gate, return_state=True)
        >>> out.shape, state.shape
        ((2, 100, 4, 16), (2, 4, 16, 16))
    """
    return default_executor()(
        RecurrentAttention(), query, key, value, g, g_gamma, gk, gv, initial_state, cu_seqlens, softmax_scale=softmax_scale,
        reverse=reverse, return_state=return_state, sequence_axis=sequence_axis, platform=platform, _cfg=cfg,
    )  # fmt: skip
