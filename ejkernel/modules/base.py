"""What every operation shares: its kernel over the registry, the executor that picks a configuration, the platform here."""

from __future__ import annotations

import functools

from ejkernel.kernels._registry import Platform, kernel_registry
from ejkernel.modules._registry_kernel import RegistryKernel
from ejkernel.ops import AutotunePolicy, ConfigSelectorChain, Executor, PersistentCache, Tuner
from ejkernel.ops.config.cache import shared_cache
from ejkernel.ops.config.policy import as_policy

__all__ = ["RegistryKernel", "create_default_executor", "default_executor", "detect_platform"]


def create_default_executor(policy: AutotunePolicy | str | None = None) -> Executor:
    """An executor with memory, disk and tuning as the environment says.

    All default executors share one memory, so a configuration that one of them tuned or imported serves all.
    `EJKERNEL_AUTOTUNE_POLICY` says what a miss does, `EJKERNEL_CACHE_DIR` where results are stored; unset, the operation
    itself says, and the platform's user cache folder is used. Both are read when they are needed.

    Args:
        policy: what a miss does; None: as the environment says, comparing and timing gradients when tuning. "autotune",
            "heuristics" and "error" mean the same whatever the environment says.
    """
    chosen = as_policy(policy, validate_backward=True)
    return Executor(ConfigSelectorChain(cache=shared_cache(), policy=chosen, tuner=Tuner(), persistent=PersistentCache))


@functools.cache
def default_executor() -> Executor:
    """The executor that all operations share."""
    return create_default_executor()


def detect_platform(algorithm: str, platform: str | Platform | None = None) -> Platform:
    """The platform that runs an algorithm here: the one named, if it can, or the best there is for None and "auto".

    Args:
        algorithm: a name that the registry knows: "recurrent", "gla" (also "recurrent_gla"), "lightning_attn", "attention",
            "gated_delta_rule".
        platform: "xla", "triton", "pallas", "cuda", "auto" or None.

    Raises:
        ValueError: no implementation fits; the message says what exists and why each was refused.

    Example:
        >>> str(detect_platform("recurrent", "xla"))
        'xla'
    """
    return kernel_registry.select(algorithm, platform).platform
