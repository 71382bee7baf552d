"""Choosing and running a configuration. This package knows nothing about attention.

`Kernel` says what an operation is and which configurations it has; `Executor` runs it with the one that
`ConfigSelectorChain` picks: explicit > overlay > memory > disk > shipped defaults > autotune > heuristics > error.
Modules that only tuning needs are imported when they are first used.
"""

from __future__ import annotations

from ejkernel.ops.config.cache import ConfigCache
from ejkernel.ops.config.overlay import overlay
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.policy import AutotunePolicy
from ejkernel.ops.config.selection import Choice, ConfigSelectorChain, Level, NoConfigError
from ejkernel.ops.executor import Executor
from ejkernel.ops.invocation import Invocation
from ejkernel.ops.kernel import Kernel
from ejkernel.ops.key import bucket
from ejkernel.ops.notices import ConfigWarning
from ejkernel.ops.reporting import report

__all__ = [
    "AutotunePolicy",
    "Choice",
    "ConfigCache",
    "ConfigSelectorChain",
    "ConfigWarning",
    "Executor",
    "Invocation",
    "Kernel",
    "Level",
    "NoConfigError",
    "PersistentCache",
    "bucket",
    "overlay",
    "report",
]
