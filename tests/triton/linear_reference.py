"""The float64 recurrence's values and gradients for the cases of this folder."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.testing.compare import reference_settings
from ejkernel.testing.linear_reference import linear_reference


def value_and_grads(arrays: dict[str, Any], weights: Any, scale: float, reverse: bool = False, cu_seqlens: Any = None) -> Any:
    """((output, final state), gradients by name) of sum(output * wo) + sum(final * ws), in float64."""
    with reference_settings():
        exact = {n: jnp.asarray(np.asarray(x, np.float64)) for n, x in arrays.items()}
        wo, ws = (jnp.asarray(np.asarray(w, np.float64)) for w in weights)
        packed = None if cu_seqlens is None else np.asarray(cu_seqlens)

        def loss(arrays: dict[str, Any]) -> Any:
            o, S = linear_reference(**arrays, softmax_scale=scale, reverse=reverse, cu_seqlens=packed)
            return jnp.sum(o * wo) + jnp.sum(S * ws), (o, S)

        grads, values = jax.jit(jax.grad(loss, has_aux=True))(exact)
        return jax.tree.map(np.asarray, (values, grads))
