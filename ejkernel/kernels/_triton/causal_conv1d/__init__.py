"""The short causal convolution on Triton. No operation takes it yet; benchmarks/RESULTS.md says what it would win."""

from ejkernel.kernels._triton.causal_conv1d._call import convolved

__all__ = ["convolved"]
