"""`lightning_attn` on triton."""

from ejkernel.kernels._linear.platform_function import lightning_problem
from ejkernel.kernels._triton.linear._interface import registered

lightning_attn = registered("lightning_attn", lightning_problem)
