"""The triton platform: kernels for NVIDIA GPUs. Importing it needs no Triton; asking for a function does."""

from typing import TYPE_CHECKING

from ejkernel.kernels._aliases import offer

if TYPE_CHECKING:  # the names that `offer` makes
    from ejkernel.kernels._triton.attention._interface import attention
    from ejkernel.kernels._triton.gated_delta_rule._interface import gated_delta_rule
    from ejkernel.kernels._triton.linear._interface import lightning_attn, recurrent, recurrent_gla

__all__ = offer(
    __name__,
    recurrent="linear",
    recurrent_gla="linear",
    lightning_attn="linear",
    gated_delta_rule="gated_delta_rule",
    attention="attention",
)
