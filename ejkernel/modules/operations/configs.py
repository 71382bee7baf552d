"""The configurations of the operations. Each is a frozen dataclass; `dataclasses.replace` changes a field."""

from __future__ import annotations

from ejkernel.kernels._attention import AttentionConfig
from ejkernel.kernels._delta import GatedDeltaRuleConfig
from ejkernel.kernels._linear import LinearConfig

__all__ = [
    "AttentionConfig",
    "GLAttentionConfig",
    "GatedDeltaRuleConfig",
    "LightningAttentionConfig",
    "RecurrentAttentionConfig",
]


# One recurrence, one configuration: the three names are the same class.
RecurrentAttentionConfig = LinearConfig
GLAttentionConfig = LinearConfig
LightningAttentionConfig = LinearConfig
