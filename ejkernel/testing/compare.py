"""How far a result may be from the float64 reference, and the comparison itself."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# Largest relative RMS error against float64 on the same rounded inputs, of values and of gradients.
LINEAR_TOLERANCES = {
    "float64": (1e-12, 1e-12),
    "float32": (2e-6, 1e-5),
    "bfloat16": (6e-3, 6e-3),
    "float16": (1e-3, 1e-3),
}
ATTENTION_TOLERANCES = {
    "float64": (1e-12, 1e-12),
    "float32": (2e-6, 2e-5),
    "bfloat16": (6e-3, 6e-3),
    "float16": (2e-3, 2e-3),
}
VALUES = ("output", "state", "weights")  # what is not a gradient


def relative_rms(got: Any, want: Any) -> float:
    """||got - want|| / ||want||; infinite for NaN, and for anything but zeros where zeros are wanted.

    What got's dtype cannot hold is no error: float16 has nothing below 6e-8, and float32 is flushed to 0 below 1e-38.

    Example:
        >>> relative_rms([3.0, 4.0], [3.0, 4.0]), relative_rms([3.0, float("nan")], [3.0, 4.0]), relative_rms([0.0], [0.0])
        (0.0, inf, 0.0)
    """
    got = np.asarray(got)
    least = max(float(jnp.finfo(got.dtype).smallest_subnormal), 1.2e-38) if jnp.issubdtype(got.dtype, jnp.floating) else 0.0
    got, want = got.astype(np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape:
        raise ValueError(f"shapes differ: {got.shape} and {want.shape}")
    if not np.isfinite(got).all():
        return np.inf
    unheld = least * np.sqrt(want.size)
    size, distance = np.linalg.norm(want), max(np.linalg.norm(got - want) - unheld, 0.0)
    return float(distance / size) if size > 0 else (0.0 if distance == 0 else np.inf)


@contextlib.contextmanager
def reference_settings() -> Iterator[None]:
    """What a reference is computed under, whatever JAX's settings are where it is asked for.

    On the CPU, where there is one beside the default device: a GPU would launch a few kernels for every token.
    """
    with (
        _on_cpu(),
        jax.enable_x64(True),
        jax.disable_jit(False),
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
    ):
        yield


def _on_cpu() -> contextlib.AbstractContextManager[None]:
    try:
        return jax.default_device(jax.local_devices(backend="cpu")[0])
    except RuntimeError:  # JAX_PLATFORMS names others alone
        return contextlib.nullcontext()


@dataclasses.dataclass(frozen=True)
class Judged:
    """One array of a result: its relative RMS error and the largest that is allowed."""

    error: float
    limit: float
    is_value: bool

    @property
    def right(self) -> bool:
        """Whether the error is within its limit; NaN is not."""
        return self.error <= self.limit


def judge(got: Mapping[str, Any], want: Mapping[str, Any], tolerance: tuple[float, float]) -> dict[str, Judged]:
    """The error of every entry of `got`. The first tolerance is for output, state and weights, the second for gradients.

    Example:
        >>> found = judge({"output": [1.0], "dkey": [2.0]}, {"output": [1.0], "dkey": [1.0]}, (1e-6, 1e-5))
        >>> found["output"].right, found["dkey"].right, found["dkey"].error
        (True, False, 1.0)
    """
    assert got.keys() == want.keys(), f"got {sorted(got)}, want {sorted(want)}"
    return {name: Judged(relative_rms(got[name], want[name]), tolerance[name not in VALUES], name in VALUES) for name in want}


def assert_close(got: Mapping[str, Any], want: Mapping[str, Any], tolerance: tuple[float, float]) -> None:
    """Every entry of `want` within tolerance; see `judge`."""
    judged = judge(got, want, tolerance)
    far = {name: f"{entry.error:.2g} > {entry.limit:.0e}" for name, entry in judged.items() if not entry.right}
    assert not far, f"relative RMS errors above their limits: {far}"
