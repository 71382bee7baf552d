"""What every operation shares: the executor that picks its configuration."""

from __future__ import annotations

from ejkernel.ops import AutotunePolicy, ConfigSelectorChain, Executor, PersistentCache, Tuner
from ejkernel.ops.config.cache import shared_cache


def create_default_executor(policy: AutotunePolicy | None = None) -> Executor:
    """An executor with memory, disk and tuning as the environment says.

    All default executors share one memory, so a configuration that one of them tuned or imported serves all.
    `EJKERNEL_AUTOTUNE_POLICY` says what a miss does, `EJKERNEL_CACHE_DIR` where results are stored; unset, the operation
    itself says, and the platform's user cache folder is used. Both are read when they are needed.

    Args:
        policy: what a miss does; None: as the environment says, comparing and timing gradients when tuning.
    """
    chosen = AutotunePolicy(validate_backward=True) if policy is None else policy
    return Executor(ConfigSelectorChain(cache=shared_cache(), policy=chosen, tuner=Tuner(), persistent=PersistentCache))
