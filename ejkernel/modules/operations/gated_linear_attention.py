"""Gated linear attention: one gate per head or per key channel."""

from __future__ import annotations

from jaxtyping import Array, Float, Int

from ejkernel.kernels._linear.operations import GLA
from ejkernel.modules.base import default_executor
from ejkernel.modules.operations._recurrence_kernel import RecurrenceKernel
from ejkernel.modules.operations._results import OutputAndState
from ejkernel.modules.operations.configs import GLAttentionConfig

__all__ = ["GLAttention", "GLAttentionConfig", "gla_attention"]


class GLAttention(RecurrenceKernel):
    """`gla_attention` as the executor sees it."""

    signature = GLA
    aliases = ("recurrent_gla",)


@GLAttention.called_by_users
def gla_attention(
    query: Float[Array, "*batch T H K"],
    key: Float[Array, "*batch T Hkv K"],
    value: Float[Array, "*batch T Hkv V"],
    g: Float[Array, "*batch T heads"] | Float[Array, "*batch T heads K"] | None = None,
    g_gamma: Float[Array, " H"] | Float[Array, "N H"] | None = None,
    initial_state: Float[Array, "N H K V"] | Float[Array, "H K V"] | None = None,
    cu_seqlens: Int[Array, " N+1"] | None = None,
    *,
    softmax_scale: float | Float[Array, ""] | None = None,
    reverse: bool = False,
    return_state: bool = False,
    sequence_axis: str | None = None,
    platform: str | None = None,
    cfg: GLAttentionConfig | None = None,
) -> Float[Array, "*batch T H V"] | OutputAndState:
    """Gated linear attention: h_t = exp(g_t) * h_{t-1} + k_t^T v_t, o_t = softmax_scale * q_t h_t.

    Args:
        query: `[B, T, H, K]`, or `[tokens, H, K]` when packed by `cu_seqlens`.
        key: `[B, T, Hkv, K]`; `Hkv` divides `H`.
        value: `[B, T, Hkv, V]`.
        g: log decay, `[B, T, H]` (whole head) or `[B, T, H, K]` (per key channel); 0 keeps, -inf forgets.
            A gate between 0 and 1 goes in by its logarithm: `jax.nn.log_sigmoid(x)`, not `sigmoid`.
        g_gamma: a further log decay that is the same at every step: `[H]`, `[1, H]` or `[N, H]`.
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
        >>> import jax
        >>> q, k, v = (jax.random.normal(jax.random.key(i), (1, 9, 2, 8)) for i in range(3))
        >>> g = jax.nn.log_sigmoid(jax.random.normal(jax.random.key(3), q.shape))
        >>> whole = gla_attention(q, k, v, g)
        >>> _, state = gla_attention(q[:, :8], k[:, :8], v[:, :8], g[:, :8], return_state=True)
        >>> last = gla_attention(q[:, 8:], k[:, 8:], v[:, 8:], g[:, 8:], initial_state=state)  # decode where prefill ended
        >>> bool(abs(last - whole[:, 8:]).max() < 1e-5)
        True
    """
    return default_executor()(
        GLAttention(), query, key, value, g, g_gamma, initial_state, cu_seqlens, softmax_scale=softmax_scale, reverse=reverse,
        return_state=return_state, sequence_axis=sequence_axis, platform=platform, _cfg=cfg,
    )  # fmt: skip
