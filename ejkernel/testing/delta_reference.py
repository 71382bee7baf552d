"""The gated delta rule as its definition says it: float64, one token at a time. The judge of every implementation."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

L2NORM_EPSILON = 1e-6


def delta_reference(
    query: Any,
    key: Any,
    value: Any,
    beta: Any,
    g: Any = None,
    softmax_scale: float | None = None,
    initial_state: Any = None,
    reverse: bool = False,
    cu_seqlens: Any = None,
    *,
    use_qk_l2norm: bool = False,
    dtype: Any = jnp.float64,
) -> tuple[jax.Array, jax.Array]:
    """`(output, final state)` of the recurrence, differentiable; call it where 64-bit numbers are enabled.

    h' = D_t(h_{t-1}), e_t = v_t - k_t h', h_t = h' + beta_t k_t^T e_t, o_t = softmax_scale * q_t h_t. `cu_seqlens` must be
    concrete. `dtype` float32 gives the step-by-step form whose own error is the measure where keys amplify rounding.

    Example:
        >>> with jax.enable_x64(True):
        ...     one = jnp.ones((1, 3, 1, 1), jnp.float64)
        ...     output, state = delta_reference(one, one, one, one[..., 0] / 2)
        >>> output.ravel().tolist(), state.shape
        ([0.5, 0.75, 0.875], (1, 1, 1, 1))
    """
    options: dict[str, Any] = {"reverse": reverse, "use_qk_l2norm": use_qk_l2norm, "dtype": dtype}
    if cu_seqlens is not None:
        return _packed((query, key, value, beta, g), softmax_scale, initial_state, np.asarray(cu_seqlens), options)
    q, k, v, b = (jnp.asarray(x, dtype) for x in (query, key, value, beta))
    B, H, K, V = q.shape[0], v.shape[2], q.shape[3], v.shape[3]
    if use_qk_l2norm:
        q, k = (x / jnp.sqrt(jnp.sum(x * x, -1, keepdims=True) + L2NORM_EPSILON) for x in (q, k))
    q, k = (jnp.repeat(x, H // x.shape[2], axis=2) for x in (q, k))
    scale = K**-0.5 if softmax_scale is None else softmax_scale
    decay = jnp.ones((*b.shape, 1)) if g is None else jnp.exp(jnp.asarray(g, dtype))
    decay = decay[..., None] if decay.ndim == 3 else decay
    S = jnp.zeros((B, H, K, V)) if initial_state is None else jnp.reshape(initial_state, (B, H, K, V))

    def step(S: jax.Array, row: Any) -> tuple[jax.Array, jax.Array]:
        q, k, v, b, decay = row
        S = S * decay[..., None]
        e = v - jnp.einsum("bhk,bhkv->bhv", k, S, precision="highest")
        S = S + b[..., None, None] * k[..., None] * e[..., None, :]
        return S, scale * jnp.einsum("bhk,bhkv->bhv", q, S, precision="highest")

    rows = tuple(jnp.moveaxis(x, 1, 0) for x in (q, k, v, b, decay.astype(dtype)))
    S, output = lax.scan(step, S.astype(dtype), rows, reverse=reverse)
    return jnp.moveaxis(output, 0, 1), S


def _packed(per_token: tuple, scale: Any, state: Any, offsets: np.ndarray, options: dict) -> tuple[jax.Array, jax.Array]:
    """Each sequence by itself."""
    rank3 = jnp.ndim(per_token[0]) == 3
    per_token = tuple(x if x is None or not rank3 else x[None] for x in per_token)
    outputs, states = [], []
    for n, (start, end) in enumerate(itertools.pairwise(offsets)):
        mine: list[Any] = [None if x is None else x[:, start:end] for x in per_token]
        begin = state if state is None or jnp.ndim(state) == 3 else state[n]
        q, k, v, b, g = mine
        output, final = delta_reference(q, k, v, b, g, scale, begin, **options)
        outputs.append(output)
        states.append(final)
    output = jnp.concatenate(outputs, 1)
    return output[0] if rank3 else output, jnp.concatenate(states)
