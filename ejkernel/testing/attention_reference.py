"""Softmax attention as its definition says it, in float64 NumPy, one query at a time; gradients by hand.

Slow and simple: what every implementation is compared with.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass
class Reference:
    """The result of one call, and the gradients for a given gradient of the output.

    Attributes:
        output: `[B, T, H, V]`.
        weights: `[B, H, T, S]`, after dropout.
        gradients: by name: query, key, value, and bias, softmax_aux, softmax_scale where they were given.
    """

    output: np.ndarray
    weights: np.ndarray
    gradients: dict[str, np.ndarray]


def attention_reference(
    query: Any,
    key: Any,
    value: Any,
    d_output: Any,
    *,
    bias: Any = None,
    softmax_aux: Any = None,
    attention_mask: Any = None,
    softmax_scale: float | None = None,
    logits_soft_cap: float | None = None,
    causal: bool = False,
    sliding_window: int | tuple[int, int] | None = None,
    q_positions: Any = None,
    kv_positions: Any = None,
    dropout_factors: Any = None,
) -> Reference:
    """Computes one call of `attention` and its gradients.

    Args:
        query, key, value: `[B, T, H, D]`, `[B, S, Hkv, D]`, `[B, S, Hkv, V]`.
        d_output: `[B, T, H, V]`, the gradient of the output.
        bias: broadcasts to `[B, 1|Hkv|H, T, S]`.
        softmax_aux: `[sinks]` or `[H|Hkv, sinks]`.
        attention_mask: `[B, S]`, `[B, T, S]` or `[B, 1|Hkv|H, T, S]`.
        q_positions, kv_positions: `[B, T]`, `[B, S]`, what causality and windows compare; None: indices.
        dropout_factors: `[B, H, T, S]`, what weights are multiplied by.
    """
    q, k, v, do = (np.asarray(x, np.float64) for x in (query, key, value, d_output))
    batch, q_len, heads, channels = q.shape
    kv_len, kv_heads = k.shape[1:3]
    scale = channels**-0.5 if softmax_scale is None else float(softmax_scale)
    keep = _keep(q.shape, k.shape, attention_mask, causal, sliding_window, q_positions, kv_positions)
    planes = None if bias is None else _per_head(np.asarray(bias, np.float64), heads, (batch, heads, q_len, kv_len))
    sinks = np.zeros((heads, 0)) if softmax_aux is None else _sinks_per_head(softmax_aux, heads)
    factors = np.ones((batch, heads, q_len, kv_len)) if dropout_factors is None else np.asarray(dropout_factors, np.float64)
    output, weights = np.zeros((batch, q_len, heads, v.shape[3])), np.zeros((batch, heads, q_len, kv_len))
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    d_bias, d_sinks, d_scale = np.zeros((batch, heads, q_len, kv_len)), np.zeros_like(sinks), 0.0
    for b, h, i in np.ndindex(batch, heads, q_len):
        g = h // (heads // kv_heads)
        raw = k[b, :, g] @ q[b, i, h]  # [S]
        scores = raw * scale
        slope = np.ones(kv_len)
        if logits_soft_cap is not None:
            scores = logits_soft_cap * np.tanh(scores / logits_soft_cap)
            slope = 1 - (scores / logits_soft_cap) ** 2
        if planes is not None:
            scores = scores + planes[b, h, i]
        logits = np.concatenate([np.where(keep[b, h, i], scores, -np.inf), sinks[h]])  # [S + sinks]
        top = logits.max(initial=-np.inf)
        if top == -np.inf:
            continue  # nothing to attend to: zeros all round
        e = np.exp(logits - top)
        p = e / e.sum()  # [S + sinks]
        weights[b, h, i] = p[:kv_len] * factors[b, h, i]
        output[b, i, h] = weights[b, h, i] @ v[b, :, g]
        dv[b, :, g] += np.outer(weights[b, h, i], do[b, i, h])
        dp = np.concatenate([(v[b, :, g] @ do[b, i, h]) * factors[b, h, i], np.zeros(sinks.shape[1])])
        d_logits = p * (dp - p @ dp)
        d_sinks[h] += d_logits[kv_len:]
        d_bias[b, h, i] = d_logits[:kv_len]
        d_scores = d_logits[:kv_len] * slope
        d_scale += d_scores @ raw
        dq[b, i, h] = scale * d_scores @ k[b, :, g]
        dk[b, :, g] += scale * np.outer(d_scores, q[b, i, h])
    gradients = {"query": dq, "key": dk, "value": dv, "softmax_scale": np.asarray(d_scale)}
    if bias is not None:
        gradients["bias"] = _sum_to(d_bias, np.shape(bias))
    if softmax_aux is not None:
        gradients["softmax_aux"] = _sinks_sum_to(d_sinks, np.shape(softmax_aux))
    return Reference(output, weights, gradients)


def _keep(
    q_shape: tuple[int, ...],
    k_shape: tuple[int, ...],
    mask: Any,
    causal: bool,
    window: int | tuple[int, int] | None,
    q_positions: Any,
    kv_positions: Any,
) -> np.ndarray:
    """Who attends to whom, `[B, H, T, S]`."""
    batch, q_len, heads, _ = q_shape
    kv_len = k_shape[1]
    keep = np.ones((batch, heads, q_len, kv_len), bool)
    i = np.broadcast_to(np.arange(q_len), (batch, q_len)) if q_positions is None else np.asarray(q_positions)
    j = np.broadcast_to(np.arange(kv_len), (batch, kv_len)) if kv_positions is None else np.asarray(kv_positions)
    i, j = i[:, None, :, None], j[:, None, None, :]
    if causal:
        keep &= j <= i
    if window is not None:
        left, right = (window, window) if isinstance(window, int) else window
        keep &= (i - left <= j) & (j <= i + right)
    if mask is not None:
        mask = np.asarray(mask)
        mask = mask[:, None, None, :] if mask.ndim == 2 else mask[:, None] if mask.ndim == 3 else mask
        keep &= _per_head(mask, heads, keep.shape)
    return keep


def _per_head(plane: np.ndarray, heads: int, shape: tuple[int, ...]) -> np.ndarray:
    """A plane with 1, Hkv or H heads as `[B, H, T, S]`."""
    plane = plane.reshape((1,) * (4 - plane.ndim) + plane.shape)
    return np.broadcast_to(np.repeat(plane, heads // plane.shape[1], 1), shape)


def _sinks_per_head(sinks: Any, heads: int) -> np.ndarray:
    sinks = np.asarray(sinks, np.float64)
    sinks = sinks[None] if sinks.ndim == 1 else sinks
    return np.repeat(sinks, heads // sinks.shape[0], 0)


def _sinks_sum_to(d_sinks: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    rows = 1 if len(shape) == 1 else shape[0]
    return d_sinks.reshape(rows, -1, d_sinks.shape[1]).sum(1).reshape(shape)


def _sum_to(d_bias: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The gradient of a bias from that of every pair: sums over the axes it was broadcast along."""
    full = (1,) * (4 - len(shape)) + tuple(shape)
    batch, heads, q_len, kv_len = d_bias.shape
    d_bias = d_bias.reshape(batch, full[1], heads // full[1], q_len, kv_len).sum(2)
    axes = tuple(axis for axis in range(4) if full[axis] == 1)
    return d_bias.sum(axes, keepdims=True).reshape(shape)
