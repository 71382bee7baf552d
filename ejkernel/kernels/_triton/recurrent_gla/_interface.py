"""`recurrent_gla` on triton."""

from ejkernel.kernels._linear.platform_function import gla_problem
from ejkernel.kernels._triton.linear._interface import registered

recurrent_gla = registered("recurrent_gla", gla_problem)
