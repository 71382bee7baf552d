"""Softmax attention in plain JAX: direct for small calls, blockwise for the rest."""
