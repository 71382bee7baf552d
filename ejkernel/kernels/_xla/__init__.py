"""The xla platform: plain JAX, for every device that XLA compiles for."""

from ejkernel.kernels._aliases import offer

__all__ = offer(
    __name__,
    recurrent="linear",
    recurrent_gla="linear",
    lightning_attn="linear",
    attention="attention",
    gated_delta_rule="gated_delta_rule",
)
