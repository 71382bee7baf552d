"""What users call: the operations, their configurations and the executor they share."""

from ejkernel.modules.base import create_default_executor
from ejkernel.modules.operations import (
    Attention,
    AttentionConfig,
    GatedDeltaRule,
    GatedDeltaRuleConfig,
    GLAttention,
    GLAttentionConfig,
    LightningAttention,
    LightningAttentionConfig,
    RecurrentAttention,
    RecurrentAttentionConfig,
    attention,
    causal_conv1d,
    gated_delta_rule,
    gla_attention,
    lightning_attention,
    recurrent_attention,
)

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
    "create_default_executor",
    "gated_delta_rule",
    "gla_attention",
    "lightning_attention",
    "recurrent_attention",
]
