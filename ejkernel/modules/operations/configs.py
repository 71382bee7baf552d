"""The configurations of the operations. Each is a frozen dataclass; `dataclasses.replace` changes a field."""

from __future__ import annotations

import dataclasses

from ejkernel.kernels._attention import AttentionConfig
from ejkernel.kernels._linear import LinearConfig

__all__ = ["AttentionConfig", "GLAttentionConfig", "LightningAttentionConfig", "RecurrentAttentionConfig"]


@dataclasses.dataclass(frozen=True)
class RecurrentAttentionConfig(LinearConfig):
    """How `recurrent_attention` runs; the fields are those of `LinearConfig`."""


@dataclasses.dataclass(frozen=True)
class GLAttentionConfig(LinearConfig):
    """How `gla_attention` runs; the fields are those of `LinearConfig`."""


@dataclasses.dataclass(frozen=True)
class LightningAttentionConfig(LinearConfig):
    """How `lightning_attention` runs; the fields are those of `LinearConfig`."""
