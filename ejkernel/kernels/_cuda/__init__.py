"""The cuda platform: NVIDIA's own libraries."""

from typing import TYPE_CHECKING

from ejkernel.kernels._aliases import offer

if TYPE_CHECKING:  # the names that `offer` makes
    from ejkernel.kernels._cuda.attention._interface import attention

__all__ = offer(__name__, attention="attention")
