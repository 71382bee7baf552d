"""The xla platform: plain JAX, for every device that XLA compiles for."""

from ejkernel.kernels._xla.attention import attention
from ejkernel.kernels._xla.gated_delta_rule import gated_delta_rule
from ejkernel.kernels._xla.lightning_attn import lightning_attn
from ejkernel.kernels._xla.recurrent import recurrent
from ejkernel.kernels._xla.recurrent_gla import recurrent_gla

__all__ = ["attention", "gated_delta_rule", "lightning_attn", "recurrent", "recurrent_gla"]
