"""Measurements; each module runs by itself: python -m benchmarks.<name>."""
