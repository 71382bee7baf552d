"""The triton platform: kernels for NVIDIA GPUs."""
