"""The recurrence with any gates, on Triton. `routes` says which kernels a call takes."""
