"""The operations, one module each."""

from ejkernel.modules.operations.attention import Attention, attention
from ejkernel.modules.operations.causal_conv1d import causal_conv1d
from ejkernel.modules.operations.configs import (
    AttentionConfig,
    GatedDeltaRuleConfig,
    GLAttentionConfig,
    LightningAttentionConfig,
    RecurrentAttentionConfig,
)
from ejkernel.modules.operations.gated_delta_rule import GatedDeltaRule, gated_delta_rule
from ejkernel.modules.operations.gated_linear_attention import GLAttention, gla_attention
from ejkernel.modules.operations.lightning_attention import LightningAttention, lightning_attention
from ejkernel.modules.operations.recurrent import RecurrentAttention, recurrent_attention

__all__ = [
    "Attention",
    "AttentionConfig",
    "GLAttention",
    "GLAttentionConfig",
    "GatedDeltaRule",
    "GatedDeltaRuleConfig",
    "LightningAttention",
    "LightningAttentionConfig",
    "RecurrentAttention",
    "RecurrentAttentionConfig",
    "attention",
    "causal_conv1d",
    "gated_delta_rule",
    "gla_attention",
    "lightning_attention",
    "recurrent_attention",
]
