"""What users call: the operations, their configurations and the executor they share."""

from ejkernel.modules.base import create_default_executor
from ejkernel.modules.operations import (
    GLAttention,
    GLAttentionConfig,
    LightningAttention,
    LightningAttentionConfig,
    RecurrentAttention,
    RecurrentAttentionConfig,
    gla_attention,
    lightning_attention,
    recurrent_attention,
)

__all__ = [
    "GLAttention",
    "GLAttentionConfig",
    "LightningAttention",
    "LightningAttentionConfig",
    "RecurrentAttention",
    "RecurrentAttentionConfig",
    "create_default_executor",
    "gla_attention",
    "lightning_attention",
    "recurrent_attention",
]
