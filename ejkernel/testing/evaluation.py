"""Values and gradients of one call of a recurrence; calls of a function that differ in their numbers alone compile once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._linear.problem import state_dtype
from ejkernel.testing.compare import reference_settings

Implementation = Callable[..., tuple[jax.Array, jax.Array]]  # (output, final state)
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


class RecurrenceCase:
    """A call of a recurrence, `arguments()`, with random `weights()` of output and final state in the loss that is compared."""

    def arguments(self) -> tuple[dict[str, jax.Array], dict[str, Any]]:
        """(differentiable arrays, other arguments) of the call."""
        raise NotImplementedError

    def weights(self) -> tuple[np.ndarray, np.ndarray]:
        """Factors of output and final state."""
        raise NotImplementedError

    def reference(self) -> Implementation:
        """The float64 form that is right."""
        raise NotImplementedError

    def evaluate(self, function: Implementation, jit: bool = True) -> dict[str, Any]:
        """output, state and the gradient of every array, from an implementation that returns `(output, state)`.

        Cases that differ in their numbers alone compile once for the same function.
        """
        arrays, _ = self.arguments()
        found = (jitted if jit else evaluated)(function, self.static(), arrays, self.weights())
        for name, x in arrays.items():
            assert found[f"d{name}"].dtype == x.dtype, f"the gradient of {name} is {found[f'd{name}'].dtype}, not {x.dtype}"
        return found

    def values(self, function: Implementation) -> dict[str, jax.Array]:
        """output and state alone, which compile much faster."""
        output, state = values(function, self.static(), self.arguments()[0])
        return {"output": output, "state": state}

    def expected(self) -> dict[str, np.ndarray]:
        """What `evaluate` gives of the reference, in float64 on the same rounded inputs."""
        arrays, _ = self.arguments()
        with reference_settings():
            wide = {name: jnp.asarray(np.asarray(x, np.float64)) for name, x in arrays.items()}
            found = jitted(self.reference(), self.static(), wide, self.weights())
        return {name: np.asarray(x) for name, x in found.items()}

    def static(self) -> Static:
        """The arguments that are no arrays, hashable."""
        _, options = self.arguments()
        offsets = options.pop("cu_seqlens", None)
        return (*options.items(), ("cu_seqlens", None if offsets is None else tuple(offsets.tolist())))
