"""What users call: the operations, their configurations and the executor they share."""

from typing import TYPE_CHECKING, NoReturn

from ejkernel._elsewhere import refuse
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


if not TYPE_CHECKING:  # with it, type checkers would take every name for one of the module

    def __getattr__(name: str) -> NoReturn:
        refuse(__name__, name)
