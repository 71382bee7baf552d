"""The xla platform: plain JAX, for every device that XLA compiles for."""

from typing import TYPE_CHECKING

from ejkernel.kernels._aliases import offer

if TYPE_CHECKING:  # the names that `offer` makes
    from ejkernel.kernels._xla.attention._interface import attention
    from ejkernel.kernels._xla.gated_delta_rule._interface import gated_delta_rule
    from ejkernel.kernels._xla.linear._interface import lightning_attn, recurrent, recurrent_gla

__all__ = offer(
    __name__,
    recurrent="linear",
    recurrent_gla="linear",
    lightning_attn="linear",
    attention="attention",
    gated_delta_rule="gated_delta_rule",
)
