"""The float64 recurrence's values and gradients for the cases of this folder."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.testing.compare import reference_settings
from ejkernel.testing.linear_reference import linear_reference


def value_and_grads(arrays: dict[str, Any], weights: Any, scale: float, reverse: bool = False, cu_seqlens: Any = None) -> Any:
    """((output, final state), gradients by name) of sum(output * wo) + sum(final * ws), in float64."""
    with reference_settings():
        exact, run = _exact(arrays, scale, reverse, cu_seqlens)
        wo, ws = (jnp.asarray(np.asarray(w, np.float64)) for w in weights)

        def loss(arrays: dict[str, Any]) -> Any:
            o, S = run(arrays)
            return jnp.sum(o * wo) + jnp.sum(S * ws), (o, S)

        grads, values = jax.jit(jax.grad(loss, has_aux=True))(exact)
        return jax.tree.map(np.asarray, (values, grads))


def values(arrays: dict[str, Any], scale: float, reverse: bool = False, cu_seqlens: Any = None) -> Any:
    """(output, final state) alone."""
    with reference_settings():
        exact, run = _exact(arrays, scale, reverse, cu_seqlens)
        return jax.tree.map(np.asarray, jax.jit(run)(exact))


def _exact(arrays: dict[str, Any], scale: float, reverse: bool, cu_seqlens: Any) -> tuple[dict[str, Any], Callable[..., Any]]:
    """The arrays in float64, and the recurrence of such arrays."""
    exact = {n: jnp.asarray(np.asarray(x, np.float64)) for n, x in arrays.items()}
    packed = None if cu_seqlens is None else np.asarray(cu_seqlens)
    return exact, lambda arrays: linear_reference(**arrays, softmax_scale=scale, reverse=reverse, cu_seqlens=packed)
