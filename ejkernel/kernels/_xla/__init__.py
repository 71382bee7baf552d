"""The xla platform: plain JAX, for every device that XLA compiles for."""

from ejkernel.kernels._xla.attention import attention
from ejkernel.kernels._xla.lightning_attn import lightning_attn
from ejkernel.kernels._xla.recurrent import recurrent
from ejkernel.kernels._xla.recurrent_gla import recurrent_gla

__all__ = ["attention", "lightning_attn", "recurrent", "recurrent_gla"]
