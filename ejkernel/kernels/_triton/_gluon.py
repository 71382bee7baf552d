"""Whether this Triton has the Gluon that our kernels for Hopper are written in. Where it has not, others take their calls."""

from __future__ import annotations

import importlib

_LANGUAGE = "triton.experimental.gluon.language"
NAMES = {  # what those kernels need when they are imported
    "triton": ("constexpr_function",),
    "triton.experimental.gluon": ("jit", "language"),
    _LANGUAGE: (
        "BlockedLayout", "DotOperandLayout", "NVMMADistributedLayout", "SliceLayout", "SwizzledSharedLayout", "constexpr",
    ),
    f"{_LANGUAGE}.nvidia.ampere": ("async_copy", "mma_v2"),
    f"{_LANGUAGE}.nvidia.hopper": ("fence_async_shared", "mbarrier", "warpgroup_mma", "warpgroup_mma_wait"),
}  # fmt: skip


def _has(module: str, names: tuple[str, ...]) -> bool:
    try:
        found = importlib.import_module(module)
    except ImportError:
        return False
    return all(hasattr(found, name) for name in names)


# Gluon is experimental: its names change. A mistake in a kernel of ours is none of these, and is raised.
HAS_GLUON = all(_has(module, names) for module, names in NAMES.items())
