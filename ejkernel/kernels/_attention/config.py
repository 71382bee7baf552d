"""How softmax attention is computed."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

from ejkernel._numbers import is_int
from ejkernel.kernels._registry import as_backend, as_platform

Schedule = Literal["direct", "blockwise", "fused"]

DEFAULT_BLOCK = 512


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """What runs, for one call of `attention`.

    Attributes:
        schedule: "direct" keeps all scores in memory; "blockwise" walks over key blocks with an online softmax and
            recomputes scores for the gradient, in memory linear in the length; "fused" is the platform's own single kernel.
        block_q: queries in a block; only "blockwise" has blocks (None there means 512).
        block_k: keys in a block, likewise.
        platform: "xla" or "cuda"; "auto" takes the best one that supports the call.
        backend: the kind of device, "any" for the one JAX computes on.

    Example:
        >>> AttentionConfig(block_q=128, block_k=256)
        AttentionConfig(schedule='blockwise', block_q=128, block_k=256, platform='auto', backend='any')
        >>> AttentionConfig(schedule="direct").block_q is None
        True
    """

    schedule: Schedule = "blockwise"
    block_q: int | None = None
    block_k: int | None = None
    platform: str = "auto"
    backend: str = "any"

    def __post_init__(self) -> None:
        if self.schedule not in get_args(Schedule):
            legal = ", ".join(map(repr, get_args(Schedule)))
            raise ValueError(f"schedule must be one of {legal}; got {self.schedule!r}.")
        for name in ("block_q", "block_k"):
            size = getattr(self, name)
            if self.schedule != "blockwise":
                if size is not None:
                    raise ValueError(f"{name} must be None with schedule {self.schedule!r}, which has no blocks; got {size}.")
            elif size is None:
                object.__setattr__(self, name, DEFAULT_BLOCK)
            elif not is_int(size) or size < 1:
                raise ValueError(f"{name} must be an int of at least 1; got {size!r}.")
            else:
                object.__setattr__(self, name, int(size))
        as_platform(self.platform)
        as_backend(self.backend)
