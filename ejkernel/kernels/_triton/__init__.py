"""The triton platform: kernels for NVIDIA GPUs. Importing it needs no Triton; asking for a function does."""

from ejkernel.kernels._aliases import offer

__all__ = offer(__name__, recurrent="linear", recurrent_gla="linear", lightning_attn="linear")
