"""Choosing and running a configuration. This package knows nothing about attention.

`Kernel` says what an operation is and which configurations it has; `Executor` runs it with the one that
`ConfigSelectorChain` picks: explicit > overlay > memory > disk > shipped defaults > autotune > heuristics > error.
Modules that only tuning needs are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ejkernel._checking import check_values
from ejkernel.ops.config.cache import ConfigCache
from ejkernel.ops.config.overlay import overlay
from ejkernel.ops.config.persistent import PersistentCache
from ejkernel.ops.config.policy import AutotunePolicy
from ejkernel.ops.config.selection import Choice, ConfigSelectorChain, Level, NoConfigError
from ejkernel.ops.executor import Executor
from ejkernel.ops.invocation import Invocation
from ejkernel.ops.kernel import Kernel
from ejkernel.ops.key import bucket
from ejkernel.ops.notices import ConfigWarning, ValueWarning
from ejkernel.ops.reporting import report

if TYPE_CHECKING:
    from ejkernel.ops.ahead import tune
    from ejkernel.ops.config.exchange import dumps, loads, merge
    from ejkernel.ops.tuner import Tuner

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
    "Tuner",
    "ValueWarning",
    "bucket",
    "check_values",
    "dumps",
    "loads",
    "merge",
    "overlay",
    "report",
    "tune",
]

_LATER = {
    "Tuner": "ejkernel.ops.tuner",
    "dumps": "ejkernel.ops.config.exchange",
    "loads": "ejkernel.ops.config.exchange",
    "merge": "ejkernel.ops.config.exchange",
    "tune": "ejkernel.ops.ahead",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LATER[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
