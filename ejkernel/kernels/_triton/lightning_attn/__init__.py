from ejkernel.kernels._triton.lightning_attn._interface import lightning_attn

__all__ = ["lightning_attn"]
