"""What cases of operations with a recurrent state share: running an implementation, and the float64 reference beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

Function = Callable[..., tuple[jax.Array, jax.Array]]  # gives (output, final state)


class StateCase:
    """One call, made from a seed. A subclass is a dataclass with at least these fields, and makes the call's arguments."""

    name: str
    heads: int
    key_channels: int
    value_channels: int
    seed: int
    reference: ClassVar[Function]

    def __str__(self) -> str:
        return self.name

    def arguments(self) -> tuple[dict[str, jax.Array], dict[str, Any]]:
        """(differentiable arrays, other arguments) of the call."""
        raise NotImplementedError(f"{type(self).__name__} must define arguments.")

    def weights(self) -> tuple[np.ndarray, np.ndarray]:
        """Random factors of output and final state in the loss whose gradients are compared."""
        rng = np.random.default_rng(self.seed + 1)
        arrays, options = self.arguments()
        sequences = len(options["cu_seqlens"]) - 1 if "cu_seqlens" in options else arrays["query"].shape[0]
        output = (*arrays["query"].shape[:-2], self.heads, self.value_channels)
        return rng.normal(size=output), rng.normal(size=(sequences, self.heads, self.key_channels, self.value_channels))

    def evaluate(self, function: Function, jit: bool = True) -> dict[str, np.ndarray]:
        """output, state and the gradient of every array, from an implementation that returns `(output, state)`."""
        arrays, options = self.arguments()
        return evaluated(lambda arrays: function(**arrays, **options), arrays, self.weights(), jit)

    def values(self, function: Function) -> dict[str, jax.Array]:
        """output and state alone, which compile much faster."""
        arrays, options = self.arguments()
        output, state = jax.jit(lambda arrays: function(**arrays, **options))(arrays)
        return {"output": output, "state": state}

    def expected(self, reference: Function | None = None) -> dict[str, np.ndarray]:
        """The same from the float64 reference on the same rounded inputs."""
        arrays, options = self.arguments()
        judge = self.reference if reference is None else reference
        with jax.enable_x64(True):
            wide = {name: jnp.asarray(np.asarray(x, np.float64)) for name, x in arrays.items()}
            found = evaluated(lambda wide: judge(**wide, **options), wide, self.weights(), jit=True)
        return {name: np.asarray(x) for name, x in found.items()}


def evaluated(
    function: Callable[[dict[str, jax.Array]], tuple[jax.Array, jax.Array]],
    arrays: dict[str, jax.Array],
    weights: tuple[np.ndarray, np.ndarray],
    jit: bool,
) -> dict[str, Any]:
    """output, state and the gradient of every array, of the loss that weighs output and state."""

    def loss(arrays: dict[str, jax.Array]) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        output, state = function(arrays)
        wide = jnp.promote_types(output.dtype, jnp.float32)
        terms = [jnp.sum(x.astype(wide) * jnp.asarray(w, wide)) for x, w in zip((output, state), weights, strict=True)]
        return terms[0] + terms[1], (output, state)

    run = jax.grad(loss, has_aux=True)
    gradients, (output, state) = (jax.jit(run) if jit else run)(arrays)
    for name, gradient in gradients.items():
        assert gradient.dtype == arrays[name].dtype, f"the gradient of {name} is {gradient.dtype}, not {arrays[name].dtype}"
    return {"output": output, "state": state, **{f"d{name}": x for name, x in gradients.items()}}
