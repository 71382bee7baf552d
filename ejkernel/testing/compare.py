"""How far a result may be from the float64 reference, and the comparison itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

# Largest relative RMS error against float64 on the same rounded inputs, of values and of gradients.
LINEAR_TOLERANCES = {
    "float64": (1e-12, 1e-12),
    "float32": (2e-6, 1e-5),
    "bfloat16": (6e-3, 6e-3),
    "float16": (1e-3, 1e-3),
}


def relative_rms(got: Any, want: Any) -> float:
    """||got - want|| / ||want||; infinite for NaN, and for anything but zeros where zeros are wanted.

    Example:
        >>> relative_rms([3.0, 4.0], [3.0, 4.0]), relative_rms([3.0, float("nan")], [3.0, 4.0]), relative_rms([0.0], [0.0])
        (0.0, inf, 0.0)
    """
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if got.shape != want.shape:
        raise ValueError(f"shapes differ: {got.shape} and {want.shape}")
    if not np.isfinite(got).all():
        return np.inf
    size, distance = np.linalg.norm(want), np.linalg.norm(got - want)
    return float(distance / size) if size > 0 else (0.0 if distance == 0 else np.inf)


def assert_close(got: Mapping[str, Any], want: Mapping[str, Any], tolerance: tuple[float, float]) -> None:
    """Every entry of `want` within tolerance: the first for "output" and "state", the second for gradients."""
    assert got.keys() == want.keys(), f"got {sorted(got)}, want {sorted(want)}"
    errors = {name: relative_rms(got[name], want[name]) for name in want}
    limits = {name: tolerance[name not in ("output", "state")] for name in want}
    far = {name: f"{error:.2g} > {limits[name]:.0e}" for name, error in errors.items() if not error <= limits[name]}
    assert not far, f"relative RMS errors above their limits: {far}"
