"""How softmax attention is computed."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, get_args

from ejkernel._numbers import is_int
from ejkernel.kernels._registry import as_backend, as_platform

Schedule = Literal["direct", "blockwise", "fused", "flash"]

DEFAULT_BLOCK = 512


@dataclasses.dataclass(frozen=True)
class AttentionConfig:
    """What runs, for one call of `attention`.

    Attributes:
        schedule: "direct" keeps all scores in memory; "blockwise" goes over key blocks with an online softmax and
            recomputes scores for the gradient, in memory linear in the length; "flash" does the same in kernels, by triton for
            NVIDIA GPUs and by pallas for TPUs; "fused" is cuDNN's kernel.
        block_q: queries in a block, for "blockwise" (None means 512) and "flash" (None means what the kernel chooses).
        block_k: keys in a block, likewise.
        platform: "xla", "cuda", "triton" or "pallas"; "auto" takes the best one that supports the call.
        backend: the kind of device, "any" for the one JAX computes on.
        num_warps: warps of a program, for "flash" on triton alone; None: what the kernel chooses.
        num_stages: loads in flight, likewise; None: as many as fit, up to what the kernel chooses.

    Example:
        >>> AttentionConfig(block_q=128).block_k
        512
        >>> AttentionConfig("flash", num_warps=8).block_k is None
        True
        >>> AttentionConfig(schedule="direct").block_q is None
        True
    """

    schedule: Schedule = "blockwise"
    block_q: int | None = None
    block_k: int | None = None
    platform: str = "auto"
    backend: str = "any"
    num_warps: int | None = dataclasses.field(default=None, metadata={"optional": True})  # not in entries stored before
    num_stages: int | None = dataclasses.field(default=None, metadata={"optional": True})

    def __post_init__(self) -> None:
        if self.schedule not in get_args(Schedule):
            legal = ", ".join(map(repr, get_args(Schedule)))
            raise ValueError(f"schedule must be one of {legal}; got {self.schedule!r}.")
        for name in ("block_q", "block_k", "num_warps", "num_stages"):
            object.__setattr__(self, name, self._checked(name, getattr(self, name)))
        as_platform(self.platform)
        as_backend(self.backend)

    def _checked(self, name: str, size: Any) -> int | None:
        """A field that holds a size; None where it is the kernel's to choose."""
        legal = ("blockwise", "flash") if name.startswith("block") else ("flash",)
        if self.schedule not in legal:
            if size is not None:
                what = "blocks" if name.startswith("block") else name
                raise ValueError(f"{name} must be None with schedule {self.schedule!r}, which has no {what}; got {size}.")
            return None
        if size is None:
            return DEFAULT_BLOCK if self.schedule == "blockwise" else None
        if not is_int(size) or size < 1:
            raise ValueError(f"{name} must be an int of at least 1; got {size!r}.")
        return int(size)
