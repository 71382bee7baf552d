"""Names of what gradients start from, so that a policy of `jax.checkpoint` can keep it instead of computing it again.

A gradient starts from the arguments of a call and from what its forward pass kept. Who keeps the latter and the output, by
`jax.checkpoint_policies.save_only_these_names`, has the forward pass run once; only the arguments are made again.
"""

from __future__ import annotations

from typing import TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name

RECURRENCE_OUTPUT = "recurrence_output"
RECURRENCE_STATES = "recurrence_states"  # before each chunk, at the end, and those that came from other shards
ATTENTION_OUTPUT = "attention_output"
ATTENTION_SUMS = "attention_sums"  # of the softmax, with its maximum

Tree = TypeVar("Tree")


def named(name: str, tree: Tree) -> Tree:
    """The arrays, known by that name to policies."""
    return jax.tree.map(lambda x: checkpoint_name(x, name), tree)
