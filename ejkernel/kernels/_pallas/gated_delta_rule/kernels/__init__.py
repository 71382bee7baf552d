"""The kernels of the delta rule: `chunks` runs them, a chunk with its gate is in `chunk`, `head_gate` and `channel_gate`."""
