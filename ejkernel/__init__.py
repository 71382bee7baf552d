"""Attention kernels for JAX: one function call, any device, exact gradients.

Start with `ejkernel.modules`; `kernel_registry` knows which implementation runs where. The operations are here by name too,
imported when asked for, and so are the modules that programs use.
"""

import importlib
from typing import Any

from ejkernel._checking import check_values
from ejkernel._elsewhere import refuse
from ejkernel._version import __version__
from ejkernel.kernels._registry import Backend, Platform, kernel_registry

__all__ = ["Backend", "Platform", "__version__", "check_values", "kernel_registry"]

_OPERATIONS = (
    "attention",
    "causal_conv1d",
    "gated_delta_rule",
    "gla_attention",
    "lightning_attention",
    "recurrent_attention",
)
__all__ += _OPERATIONS


_MODULES = ("callib", "modules", "ops", "testing", "types")


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in _OPERATIONS:
        refuse(__name__, name)
    from ejkernel import modules

    return getattr(modules, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_OPERATIONS, *_MODULES})
