"""Other ways to launch kernels of the triton platform, for tiles that no configuration names: `benchmarks.launch_variants_gpu`.

A variant that gains becomes how the kernel is launched, and leaves this list. Its figures go to benchmarks/NOTES_gpu.md, as do
those of one that loses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

from ejkernel.callib import triton_call
from ejkernel.testing.linear_gpu import RESETS

Options = dict[str, Any]  # what a kernel is launched with, the grid among it


@dataclasses.dataclass(frozen=True)
class Variant:
    """Another way to launch a kernel, and the calls on which it may pay: family, shape and gate."""

    name: str
    kernel: str
    change: Callable[[Options], Options]
    calls: tuple[tuple[str, str, str], ...]


FOUR_WARPS: Options = {"num_warps": 4, "maxnreg": None}
VARIANTS = [
    Variant(
        "4 warps", "gated_axis", lambda options: {**options, **FOUR_WARPS},
        tuple(("linear", shape, RESETS) for shape in ("8x2048x16x128x128", "4x4096x32x64x64", "8x4096x4x256x512")),
    ),
    Variant(
        "4 warps", "delta_gated_gradients", lambda options: {**options, **FOUR_WARPS},
        tuple(("delta", shape, "channel, strong") for shape in ("8x2048x16x128x128", "4x4096x32x64x64")),
    ),
]  # fmt: skip


@contextlib.contextmanager
def launched(variant: Variant) -> Iterator[list[Options]]:
    """Inside, calls that are traced anew launch the kernel so. Gives the launches that were changed."""
    changed: list[Options] = []

    def call(*args: Any, kernel: Any, **options: Any) -> Any:
        if kernel.fn.__name__ == variant.kernel:
            new = variant.change(options)
            if new is not options:
                changed.append(new)
            options = new
        return triton_call(*args, kernel=kernel, **options)

    routes = [module for name, module in sys.modules.items() if name.startswith("ejkernel.kernels.")]
    modules = [module for module in routes if vars(module).get("triton_call") is triton_call]
    jax.clear_caches()  # what has been traced keeps its launches
    for module in modules:
        module.triton_call = call  # type: ignore[attr-defined]
    try:
        yield changed
    finally:
        for module in modules:
            module.triton_call = triton_call  # type: ignore[attr-defined]
        jax.clear_caches()
