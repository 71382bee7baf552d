"""Which blocks of keys each block of queries must look at.

A block is left out when no pair in it attends. What is known while tracing (bounds on indices) gives NumPy tables, which
become constants; positions, segments and masks give traced ones.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from ejkernel._sizes import known
from ejkernel.kernels._attention.problem import AttentionProblem


class Visits(NamedTuple):
    """Block i of the queries visits key blocks `order[i, 0]` to `order[i, counts[i] - 1]`."""

    counts: Array | np.ndarray  # [query blocks]
    order: Array | np.ndarray  # [query blocks, key blocks]

    def number(self, i: Array) -> int | Array:
        """How many key blocks query block i visits: a Python int when it is known and the same for all."""
        if isinstance(self.counts, np.ndarray) and np.all(self.counts == self.counts[0]):
            return int(self.counts[0])
        return jnp.asarray(self.counts)[i]


def visits(problem: AttentionProblem, block_q: int, block_k: int) -> Visits:
    """The visits of a problem whose lengths are multiples of the block sizes."""
    blocks_q, blocks_k = problem.q_len // block_q, problem.kv_len // block_k
    needed: Any = (np if known(blocks_q, blocks_k) else jnp).ones((blocks_q, blocks_k), bool)
    q_low, q_high = _ranges(problem.q_positions, blocks_q, block_q)  # [b, blocks_q]
    k_low, k_high = _ranges(problem.kv_positions, blocks_k, block_k)  # [b, blocks_k]
    bounds: Any = True
    if problem.left is not None:
        bounds = bounds & (k_high[:, None, :] >= q_low[:, :, None] - problem.left)
    if problem.right is not None:
        bounds = bounds & (k_low[:, None, :] <= q_high[:, :, None] + problem.right)
    if bounds is not True:
        needed = needed & bounds.any(0)
    if problem.q_segment_ids is not None and problem.kv_segment_ids is not None:
        q, k = _blocks(problem.q_segment_ids, block_q), _blocks(problem.kv_segment_ids, block_k)
        # Padding is left out of both ends of the range, so blocks of padding overlap with nothing.
        top = jnp.iinfo(q.dtype).max
        q_low, k_low = (jnp.where(x >= 0, x, top).min(2) for x in (q, k))
        overlap = (q_low[:, :, None] <= k.max(2)[:, None, :]) & (k_low[:, None, :] <= q.max(2)[:, :, None])
        needed = needed & overlap.any(0)
    if problem.mask is not None:
        needed = needed & _any_kept(problem.mask, blocks_q, blocks_k)
    array_module = np if isinstance(needed, np.ndarray) else jnp
    order = array_module.argsort(~needed, axis=1, stable=True)
    return Visits(needed.sum(1).astype(np.int32), order.astype(np.int32))


def _ranges(positions: Array | None, count: int, block: int) -> tuple[Any, Any]:
    """The lowest and the highest position in each block, `[b, blocks]`; indices, known now, where there are none."""
    if positions is None:
        first = (np if known(count) else jnp).arange(count)[None] * block
        return first, first + block - 1
    blocks = _blocks(positions, block)
    return blocks.min(2), blocks.max(2)


def _blocks(x: Array, block: int) -> Array:
    """`[b, L]` as `[b, blocks, block]`."""
    return x.reshape(x.shape[0], -1, block)


def _any_kept(mask: Bool[Array, "b h t s"], blocks_q: int, blocks_k: int) -> Bool[Array, "nq nk"]:
    """Whether a mask keeps any pair of a block, in any row and head; axes of size 1 do not vary."""
    plane = mask.any((0, 1))  # [t, s]
    rows = 1 if plane.shape[0] == 1 else blocks_q
    columns = 1 if plane.shape[1] == 1 else blocks_k
    plane = plane.reshape(rows, plane.shape[0] // rows, columns, plane.shape[1] // columns).any((1, 3))
    return jnp.broadcast_to(plane, (blocks_q, blocks_k))
