"""Values and gradients of one call of a recurrence; calls of a function that differ in their numbers alone compile once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._linear.problem import state_dtype

Static = tuple[tuple[str, Any], ...]  # the arguments that are no arrays, `cu_seqlens` as a tuple or None among them


def _call(function: Callable, static: Static, arrays: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    options = dict(static)
    offsets = options.pop("cu_seqlens")
    packing = {} if offsets is None else {"cu_seqlens": np.asarray(offsets, np.int32)}
    return function(**arrays, **options, **packing)


def evaluated(function: Callable, static: Static, arrays: dict[str, jax.Array], weights: tuple[Any, Any]) -> dict[str, Any]:
    """output, state, and the gradient of each array for a loss that weighs both."""

    def loss(arrays: dict[str, jax.Array]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        output, state = _call(function, static, arrays)
        wide = state_dtype(output)
        terms = [jnp.sum(x.astype(wide) * jnp.asarray(w, wide)) for x, w in zip((output, state), weights, strict=True)]
        return terms[0] + terms[1], (output, state)

    gradients, (output, state) = jax.grad(loss, has_aux=True)(arrays)
    return {"output": output, "state": state, **{f"d{name}": x for name, x in gradients.items()}}


jitted = jax.jit(evaluated, static_argnums=(0, 1))
values = jax.jit(_call, static_argnums=(0, 1))
