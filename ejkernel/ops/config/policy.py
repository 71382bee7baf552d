"""`AutotunePolicy`: what to do when nothing is known about a call."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

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
        for name in ("allow_autotune", "validate_backward"):
            if not isinstance(value := getattr(self, name), bool):
                hint = f"; for a policy by its word, give cache_miss_fallback={value!r}" if value in _LEGAL else ""
                raise TypeError(f"{name} must be True or False; got {value!r}{hint}.")
        if self.cache_miss_fallback is not None:
            _legal(self.cache_miss_fallback, "cache_miss_fallback")

    def fallback(self, kernel: Kernel[Any, Any], backend: str) -> str:
        """`"autotune"`, `"heuristics"` or `"error"` for this kernel on this backend."""
        return self.ruling(kernel, backend)[0]

    def ruling(self, kernel: Kernel[Any, Any], backend: str) -> tuple[str, str]:
        """`fallback`, and who said so: the policy, the environment or the kernel."""
        if self.cache_miss_fallback is not None:
            choice, whose = self.cache_miss_fallback, f"cache_miss_fallback={self.cache_miss_fallback!r}"
        elif (said := _legal(os.environ.get(VARIABLE) or None, VARIABLE)) is not None:
            choice, whose = said, f"{VARIABLE}={said}"
        else:
            own = _legal(kernel.default_policy(backend), f"{type(kernel).__name__}.default_policy") or "heuristics"
            choice, whose = own, f"{kernel.op_id} says {own!r} on {backend}, and {VARIABLE} is not set"
        if choice == "autotune" and not self.allow_autotune:
            return "heuristics", "allow_autotune=False"
        return choice, whose


def as_policy(policy: AutotunePolicy | str | None, validate_backward: bool = False) -> AutotunePolicy:
    """A policy: itself, or one whose misses do what a word says; None leaves that to the environment and the kernel.

    Args:
        validate_backward: of the policy that is made where none was given as such.
    """
    if isinstance(policy, AutotunePolicy):
        return policy
    if policy is not None and not isinstance(policy, str):
        raise TypeError(f"policy must be an AutotunePolicy, one of {', '.join(map(repr, _LEGAL))}, or None; got {policy!r}.")
    return AutotunePolicy(cache_miss_fallback=_legal(policy, "policy"), validate_backward=validate_backward)


def _legal(value: str | None, name: str) -> str | None:
    if value is not None and value not in _LEGAL:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, _LEGAL))}; got {value!r}.")
    return value
