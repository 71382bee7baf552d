"""Who attends to whom, as the flash kernels read it."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from ejkernel.callib import cdiv, triton_call
from ejkernel.kernels._triton.attention._plan import Plan, varies
from ejkernel.kernels._triton.attention._ranges import bit_ranges, tile_ranges
from ejkernel.kernels._triton.attention.kernels.call import Call, Plane
from ejkernel.kernels._triton.attention.kernels.packing import pack_mask

KEYS = 256  # of a program that packs; words of a row come in so many, see `words_of` of the kernels
NAMES = {
    "q_segments": "q_segment_ids",
    "kv_segments": "kv_segment_ids",
    "q_positions": "q_positions",
    "kv_positions": "kv_positions",
}


class Masks(NamedTuple):
    """What masks a call.

    Attributes:
        call: the constants of its kernels.
        operands: what they read: the mask, segments and positions, or bits that say the same.
        bits_of_keys: of such a call, what the kernel of the keys' gradient reads.
        others: mask, segments and positions as they are given; None: they are in the bits.
    """

    plan: Plan
    lengths: tuple[int, int]
    call: Call
    operands: dict[str, Any]
    bits_of_keys: jax.Array | None
    others: dict[str, Any] | None

    @classmethod
    def of(cls, plan: Plan, arrays: dict[str, Any], others: dict[str, Any], *, of_keys: bool) -> Masks:
        """A mask that varies over queries and keys is packed; decoding reads it as it is.

        Args:
            of_keys: whether the keys' gradient is wanted too.
        """
        call = plan.call(arrays, others)
        lengths = arrays["query"].shape[1], arrays["key"].shape[1]
        operands = {"mask": others.get("mask"), **{name: others.get(given) for name, given in NAMES.items()}}
        if plan.grouped or not varies(others.get("mask")):
            return cls(plan, lengths, call, operands, None, others)
        bits, bits_of_keys = _packed(call, operands, lengths, of_keys)
        call = call._replace(MASK=Plane(int(bits.shape[0] > 1), bits.shape[1], 1, 1), PACKED=True)
        if operands["q_positions"] is not None:  # without them tiles of a bias's gradient are skipped by their indices
            call = call._replace(LEFT=None, RIGHT=None)
        return cls(plan, lengths, call, {**dict.fromkeys(operands), "mask": bits}, bits_of_keys, None)

    def ranges(
        self, blocks: tuple[int, int], *, of_keys: bool = False, groups: tuple[int, int] | None = None
    ) -> jax.Array | None:
        """Which tiles the programs of a kernel visit; None: bounds on indices say it."""
        if self.others is None:
            return bit_ranges(self.operands["mask"], self.lengths, blocks, of_keys=of_keys)
        return tile_ranges(self.others, self.plan.left, self.plan.right, self.lengths, blocks, of_keys=of_keys, groups=groups)


def _packed(
    call: Call, operands: dict[str, Any], lengths: tuple[int, int], of_keys: bool
) -> tuple[jax.Array, jax.Array | None]:
    """(bits by queries `[1|B, heads, T, words]`, bits by keys `[1|B, heads, S, words]` or None)."""
    T, S = lengths
    query_words, key_words = (cdiv(length, KEYS) * (KEYS // 32) for length in lengths)
    batch = max(x.shape[0] for x in operands.values() if x is not None)
    heads = operands["mask"].shape[1]
    shape = lambda rows, words: jax.ShapeDtypeStruct((batch, heads, rows, words), np.uint32)
    found = triton_call(
        arguments={**operands, "T": T, "S": S, "KEY_WORDS": key_words, "QUERY_WORDS": query_words},
        out_shape={"bits": shape(T, key_words), "bits_of_keys": shape(S, query_words) if of_keys else None},
        kernel=pack_mask, grid=query_words * (key_words * 32 // KEYS) * heads * batch, num_warps=4,
        CALL=call, HEADS=heads, KEYS=KEYS,
    )  # fmt: skip
    return found["bits"], found["bits_of_keys"] if of_keys else None
