from ejkernel.kernels._triton.recurrent_gla._interface import recurrent_gla

__all__ = ["recurrent_gla"]
