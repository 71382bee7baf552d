"""One module per kernel, named by what it computes."""
