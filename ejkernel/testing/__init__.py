"""What implementations are compared with: float64 references, shared cases and tolerances.

Users who write kernels of their own may import this package.
"""
