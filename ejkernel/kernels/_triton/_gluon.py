"""Whether this Triton has the Gluon that our kernels for Hopper are written in. Where it has not, others take their calls."""

from __future__ import annotations

import importlib

_LANGUAGE = "triton.experimental.gluon.language"
Needed = tuple[str | tuple[str, ...], ...]
NAMES: dict[str, Needed] = {  # what those kernels need when they are imported; of a tuple one name, since versions differ
    "triton": ("constexpr_function",),
    "triton.experimental.gluon": ("jit", "language"),
    _LANGUAGE: (
        "BlockedLayout", "DotOperandLayout", "NVMMADistributedLayout", "SliceLayout", "SwizzledSharedLayout", "constexpr",
        ("barrier", "thread_barrier"),
    ),
    f"{_LANGUAGE}.nvidia.ampere": ("async_copy", "mma_v2"),
    f"{_LANGUAGE}.nvidia.ampere.async_copy": (("async_load", "async_copy_global_to_shared"),),
    f"{_LANGUAGE}.nvidia.hopper": ("fence_async_shared", "mbarrier", "warpgroup_mma", "warpgroup_mma_wait"),
}  # fmt: skip


def _has(module: str, names: Needed) -> bool:
    try:
        found = importlib.import_module(module)
    except ImportError:
        return False
    return all(any(hasattr(found, name) for name in ((one,) if isinstance(one, str) else one)) for one in names)


# Gluon is experimental: its names change. A mistake in a kernel of ours is none of these, and is raised.
HAS_GLUON = all(_has(module, names) for module, names in NAMES.items())
