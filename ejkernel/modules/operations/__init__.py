"""The operations, one module each."""

from ejkernel.modules.operations.attention import Attention, attention
from ejkernel.modules.operations.configs import (
    AttentionConfig,
    GLAttentionConfig,
    LightningAttentionConfig,
    RecurrentAttentionConfig,
)
from ejkernel.modules.operations.gated_linear_attention import GLAttention, gla_attention
from ejkernel.modules.operations.lightning_attention import LightningAttention, lightning_attention
from ejkernel.modules.operations.recurrent import RecurrentAttention, recurrent_attention

__all__ = [
    "Attention",
    "AttentionConfig",
    "GLAttention",
    "GLAttentionConfig",
    "LightningAttention",
    "LightningAttentionConfig",
    "RecurrentAttention",
    "RecurrentAttentionConfig",
    "attention",
    "gla_attention",
    "lightning_attention",
    "recurrent_attention",
]
