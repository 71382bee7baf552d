"""What implementations are compared with: float64 references, shared cases and tolerances; one record per operation.

Users who write kernels of their own may import this package.
"""
