"""Sizes that are not known: the symbolic dimensions of `jax.export`.

They take part in arithmetic and in shapes, but comparing one with a number may have no answer.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


def known(*sizes: Any) -> bool:
    """Whether every size is a number."""
    return all(isinstance(size, int) for size in sizes)


def unknown_sizes(tree: Any) -> list[str]:
    """The sizes of a pytree's arrays that are not known, in the words they were given in."""
    sizes = (size for leaf in jax.tree.leaves(tree) for size in getattr(leaf, "shape", ()))
    return sorted({str(size) for size in sizes if not known(size)})


def as_value(size: Any) -> Any:
    """A size as something to compute with: itself, or an array that holds it when the program runs."""
    return size if known(size) else jnp.asarray(size, jnp.int32)
