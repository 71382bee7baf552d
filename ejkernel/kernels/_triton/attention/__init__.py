"""Softmax attention on Triton: forward and backward flash kernels for every option. `_plan` says which kernels a call takes."""
