"""The linear operations in plain JAX: step by step, or in chunks."""
