"""Lightning attention: a constant decay per head that the layer's depth sets."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from ejkernel.kernels._linear.operations import LIGHTNING
from ejkernel.modules.base import default_executor
from ejkernel.modules.operations._recurrence_kernel import RecurrenceKernel
from ejkernel.modules.operations._results import OutputAndState
from ejkernel.modules.operations.configs import LightningAttentionConfig

__all__ = ["LightningAttention", "LightningAttentionConfig", "lightning_attention"]


class LightningAttention(RecurrenceKernel):
    """`lightning_attention` as the executor sees it."""

    signature = LIGHTNING


@LightningAttention.called_by_users
def lightning_attention(
    query: Float[Array, "*batch T H K"],
    key: Float[Array, "*batch T Hkv K"],
    value: Float[Array, "*batch T Hkv V"],
    initial_state: Float[Array, "N H K V"] | Float[Array, "H K V"] | None = None,
    cu_seqlens: Int[Array, " N+1"] | None = None,
    *,
    layer_idx: int,
    num_layers: int,
    softmax_scale: float | Float[Array, ""] | None = None,
    reverse: bool = False,
    return_state: bool = False,
    sequence_axis: str | None = None,
    platform: str | None = None,
    cfg: LightningAttentionConfig | None = None,
) -> Float[Array, "*batch T H V"] | OutputAndState:
    """Linear attention with a constant decay per head: h_t = exp(gamma) * h_{t-1} + k_t^T v_t, o_t = softmax_scale * q_t h_t.

    gamma = -(8 / H * (1 - layer_idx / num_layers)) * arange(H): head 0 keeps everything, deeper layers keep more. H counts the
    heads of this call. Inside `jax.shard_map` over heads that is a shard's own, whose decays would be others: `gla_attention`
    takes the right ones as `g_gamma` ("Several devices" in the documentation).

    Args:
        query: `[B, T, H, K]`, or `[tokens, H, K]` when packed by `cu_seqlens`.
        key: `[B, T, Hkv, K]`; `Hkv` divides `H`.
        value: `[B, T, Hkv, V]`.
        initial_state: the state before the first step, `[N, H, K, V]`; N is the batch, or the number of packed sequences.
        cu_seqlens: `[N + 1]` offsets, 0 to the number of tokens, that pack N sequences in one row; then B is 1, or left out.
        layer_idx: this layer, from 0 to `num_layers` - 1.
        num_layers: how many layers the model has.
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
        >>> import jax
        >>> q, k, v = (jax.random.normal(jax.random.key(i), (1, 32, 4, 8)) for i in range(3))
        >>> lightning_attention(q, k, v, layer_idx=3, num_layers=12).shape
        (1, 32, 4, 8)
    """
    return default_executor()(
        LightningAttention(), query, key, value, initial_state, cu_seqlens, layer_idx=layer_idx, num_layers=num_layers,
        softmax_scale=softmax_scale, reverse=reverse, return_state=return_state, sequence_axis=sequence_axis,
        platform=platform, _cfg=cfg,
    )  # fmt: skip
