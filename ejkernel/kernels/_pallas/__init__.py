"""The pallas platform: kernels for TPUs. Compiled for TPU v4 to 7x and verified interpreted; not yet run on a TPU."""

from typing import TYPE_CHECKING

from ejkernel.kernels._aliases import offer

if TYPE_CHECKING:  # the names that `offer` makes
    from ejkernel.kernels._pallas.attention._interface import attention
    from ejkernel.kernels._pallas.gated_delta_rule._interface import gated_delta_rule
    from ejkernel.kernels._pallas.linear._interface import lightning_attn, recurrent, recurrent_gla

__all__ = offer(
    __name__,
    recurrent="linear",
    recurrent_gla="linear",
    lightning_attn="linear",
    gated_delta_rule="gated_delta_rule",
    attention="attention",
)
