"""The gated delta rule on Triton. `routes` says which kernels a call takes; what both recurrences share lies in `linear`."""
