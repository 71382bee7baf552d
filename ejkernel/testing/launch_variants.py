"""Other ways to launch kernels of the triton platform, for tiles that no configuration names: `benchmarks.launch_variants_gpu`.

A variant that gains becomes how the kernel is launched, and leaves this list. Its figures go to benchmarks/NOTES_gpu.md, as do
those of one that loses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax

from ejkernel.callib import triton_call
from ejkernel.testing.linear_gpu import RESETS

Options = dict[str, Any]  # what a kernel is launched with, the grid among it
FIRST, PACKED, LONG = "8x2048x16x128x128", "packed 32768x16x128x128", "1x16384x16x128x128"


@dataclasses.dataclass(frozen=True)
class Variant:
    """Another way to launch a kernel, and the calls on which it may pay: family, shape and gate."""

    name: str
    kernel: str
    change: Callable[[Options], Options]
    calls: tuple[tuple[str, str, str], ...]


def _with(options: Options, **changes: Any) -> Options:
    return {**options, **changes}


def _whole_ends(options: Options, stages: int) -> Options:
    """All value channels in one program of twice the warps, in launches that find the segments' ends, which keep no states."""
    tiles = options["DB"] // options["BB"]
    if tiles != 2 or options["out_shape"]["states"] is not None:
        return options
    (programs,) = options["grid"]
    return _with(options, BB=options["DB"], num_warps=8, STAGES=stages, grid=(programs // tiles,))


STRONG = (("linear", FIRST, RESETS),)
STRONG_DELTA = (("delta", FIRST, "channel, strong"),)
VARIANTS = [
    *(
        Variant(
            f"ends by 8 warps, {stages} chunks in flight", "state_scan", functools.partial(_whole_ends, stages=stages),
            tuple(("linear", shape, gate) for shape in (PACKED, LONG) for gate in ("g_gamma", "g")),
        )
        for stages in (3, 4)
    ),
    *(
        Variant(f"64 channels a turn, {n} registers", "gated_rows", functools.partial(_with, BK=64, maxnreg=n), STRONG)
        for n in (255, 168, 128)
    ),
    Variant("168 registers", "gated_key_rows", functools.partial(_with, maxnreg=168), STRONG_DELTA),
    Variant("32 channels a turn", "gated_key_rows", functools.partial(_with, BK=32), STRONG_DELTA),
    Variant("the states first", "gated_axis", functools.partial(_with, STATES_FIRST=True), STRONG),
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
