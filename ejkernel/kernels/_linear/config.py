"""How an operation with a recurrent state runs: data that the executor picks and a platform reads."""

from __future__ import annotations

import dataclasses
from typing import ClassVar, Literal, get_args

from ejkernel._numbers import is_int
from ejkernel.kernels._registry import as_backend, as_platform

Schedule = Literal["chunked", "recurrent"]
Exchange = Literal["gather", "steps"]
MAX_BLOCK_Q = 1024
TILE_FIELDS = {
    "block_k": (16, 32, 64, 128, 256, 512),
    "block_d": (16, 32, 64, 128, 256, 512),
    "num_warps": (1, 2, 4, 8, 16),
    "num_stages": (1, 2, 3, 4, 5, 6),
    "block_h": (1, 2, 4, 8, 16),
}


@dataclasses.dataclass(frozen=True)
class RecurrenceConfig:
    """How one call of an operation with a recurrent state runs. Each family has a class of its own with these fields.

    Args:
        schedule: `"chunked"` computes blocks of tokens by matrix products; `"recurrent"` goes step by step.
        block_q: tokens per chunk, a power of two. The backward pass is always chunked, so in both schedules the states that
            the gradient keeps are at least so many tokens apart.
        block_k, block_d: key and value channels per tile, powers of two from 16 on; None: each kernel's own choice. Only
            platforms that tile channels read them (triton).
        num_warps, num_stages: warps per program and depth of its load pipeline, likewise.
        platform: the platform to run on; `"auto"` takes the best one that supports the call.
        backend: the kind of device, `"any"` for the one JAX computes on.
        exchange: how states travel between n devices where `sequence_axis` splits time. `"gather"`: each gets all summaries,
            in one collective. `"steps"`: log2(n) exchanges of one summary. None: gather up to 8 devices.
        block_h: at most so many heads in a block; None: the kernel's own choice. Only pallas reads it.
    """

    schedule: Schedule = "chunked"
    block_q: int = 64
    platform: str = "auto"
    backend: str = "any"
    block_k: int | None = None
    block_d: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    # These two are not in entries stored before.
    exchange: Exchange | None = dataclasses.field(default=None, metadata={"optional": True})
    block_h: int | None = dataclasses.field(default=None, metadata={"optional": True})

    def __post_init__(self) -> None:
        if self.schedule not in get_args(Schedule):
            raise ValueError(f"schedule must be 'chunked' or 'recurrent'; got {self.schedule!r}.")
        for name in ("block_q", *TILE_FIELDS):
            if is_int(value := getattr(self, name)):
                object.__setattr__(self, name, int(value))  # a numpy integer would be another configuration to a cache
        power_of_two = type(self.block_q) is int and self.block_q > 0 and self.block_q & (self.block_q - 1) == 0
        if not power_of_two or self.block_q > MAX_BLOCK_Q:
            raise ValueError(
                f"block_q must be a power of two from 1 to {MAX_BLOCK_Q}, since a chunk is halved down to single tokens; "
                f"got {self.block_q!r}."
            )
        for name, legal in TILE_FIELDS.items():
            if (value := getattr(self, name)) is not None and (type(value) is not int or value not in legal):
                raise ValueError(f"{name} must be None or one of {', '.join(map(str, legal))}; got {value!r}.")
        if self.exchange not in (None, *get_args(Exchange)):
            raise ValueError(f"exchange must be None, 'gather' or 'steps'; got {self.exchange!r}.")
        as_platform(self.platform)
        as_backend(self.backend)

    def tiles(self) -> list[str]:
        """The fields that name a tile, where they are given: a platform that would not read one must refuse it."""
        return [name for name in TILE_FIELDS if getattr(self, name) is not None]


@dataclasses.dataclass(frozen=True)
class LinearConfig(RecurrenceConfig):
    """How a linear operation runs; the fields are those of `RecurrenceConfig`.

    Example:
        >>> LinearConfig(schedule="chunked", block_q=32)
        LinearConfig(schedule='chunked', block_q=32, platform='auto', backend='any', block_k=None, block_d=None,
                     num_warps=None, num_stages=None, exchange=None, block_h=None)
    """

    public_names: ClassVar[tuple[str, ...]] = ("RecurrentAttentionConfig", "GLAttentionConfig", "LightningAttentionConfig")
