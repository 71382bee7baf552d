"""Blocks to start a model from: gated linear attention, gated DeltaNet and softmax attention.

`with_equinox` and `with_nnx` hold the same three blocks for two libraries, each in one file to take along; `parts` has what
both use. They give the same numbers from the same weights (`weights.copy`).
"""
