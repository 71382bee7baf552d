"""Weights from one library's block to the other's: both have the same parts by the same names."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
from flax import nnx


def copy(source: eqx.Module, target: nnx.Module) -> None:
    """Puts the weights of an Equinox block into the NNX block of the same kind and size.

    Raises:
        ValueError: a weight that only one of them has, or that has another shape in the other.
    """
    arrays = jax.tree_util.tree_flatten_with_path(eqx.filter(source, eqx.is_array))[0]
    given = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in arrays}
    wanted = dict(nnx.to_flat_state(nnx.state(target, nnx.Param)))
    if strangers := sorted(given.keys() ^ {_name(path) for path in wanted}):
        raise ValueError(f"both blocks must have the same weights; only one has {', '.join(strangers)}.")
    for path, variable in wanted.items():
        if variable.shape != (shape := given[_name(path)].shape):
            raise ValueError(f"{_name(path)} must be {list(variable.shape)}; got {list(shape)}.")
    flat = {path: variable.replace(given[_name(path)]) for path, variable in wanted.items()}
    nnx.update(target, nnx.from_flat_state(flat))


def _name(path: tuple[Any, ...]) -> str:
    """The name in Equinox: a matrix is `kernel` in Flax, and `weight` there."""
    return ".".join("weight" if part == "kernel" else str(part) for part in path)
