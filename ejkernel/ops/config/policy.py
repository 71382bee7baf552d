"""`AutotunePolicy`: what to do when nothing is known about a call."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ejkernel.ops.kernel import Kernel

VARIABLE = "EJKERNEL_AUTOTUNE_POLICY"
_LEGAL = ("autotune", "heuristics", "error")


@dataclass(frozen=True)
class AutotunePolicy:
    """What a miss does.

    Attributes:
        allow_autotune: False never measures during a call; `ejkernel.ops.tune` still does.
        cache_miss_fallback: `"autotune"` measures, `"heuristics"` takes the kernel's own guess, `"error"` raises. None reads
            the environment variable `EJKERNEL_AUTOTUNE_POLICY`, and where that is unset asks the kernel.
        validate_backward: tuning also measures and compares gradients.
    """

    allow_autotune: bool = True
    cache_miss_fallback: str | None = None
    validate_backward: bool = False

    def __post_init__(self) -> None:
        if self.cache_miss_fallback is not None:
            _legal(self.cache_miss_fallback, "cache_miss_fallback")

    def fallback(self, kernel: Kernel, backend: str) -> str:
        """`"autotune"`, `"heuristics"` or `"error"` for this kernel on this backend."""
        said = self.cache_miss_fallback or _legal(os.environ.get(VARIABLE) or None, VARIABLE)
        choice = said or _legal(kernel.default_policy(backend), f"{type(kernel).__name__}.default_policy") or "heuristics"
        return "heuristics" if choice == "autotune" and not self.allow_autotune else choice


def _legal(value: str | None, name: str) -> str | None:
    if value is not None and value not in _LEGAL:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, _LEGAL))}; got {value!r}.")
    return value
