"""`recurrent` on triton."""

from ejkernel.kernels._linear.platform_function import recurrent_problem
from ejkernel.kernels._triton.linear._interface import registered

recurrent = registered("recurrent", recurrent_problem)
