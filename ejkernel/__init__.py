"""Attention kernels for JAX: one function call, any device, exact gradients.

Start with `ejkernel.modules`; `kernel_registry` knows which implementation runs where. The operations are here by name too,
imported when asked for.
"""

from typing import Any

from ejkernel._version import __version__
from ejkernel.kernels._registry import Backend, Platform, kernel_registry

__all__ = ["Backend", "Platform", "__version__", "kernel_registry"]

_OPERATIONS = (
    "attention",
    "causal_conv1d",
    "gated_delta_rule",
    "gla_attention",
    "lightning_attention",
    "recurrent_attention",
)


def __getattr__(name: str) -> Any:
    if name not in _OPERATIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from ejkernel import modules

    return getattr(modules, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_OPERATIONS})
