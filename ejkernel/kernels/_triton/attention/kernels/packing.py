"""A mask as bits: one word for 32 keys of a query, or for 32 queries of a key.

A program of a flash kernel reads one byte a score of a boolean mask, and turns it to where its score is; of words it reads one
for 32 scores, which every thread has where it needs them. Bounds, windows, segments and positions go into the bits too, so that
the flash kernels test a bit and nothing else.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ejkernel.kernels._triton.attention.kernels.call import Given
from ejkernel.kernels._triton.attention.kernels.logits import aligned, kept_scores, program_at, seen_tile


@triton.jit
def pack_mask(
    mask, q_segments, kv_segments, q_positions, kv_positions, T, S, KEY_WORDS, QUERY_WORDS,
    bits, bits_of_keys,
    CALL: tl.constexpr, HEADS: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Programs: query words * (key words / (KEYS / 32)) * HEADS * batch, each of 32 queries and KEYS keys.

    bits [B, HEADS, T, KEY_WORDS], and if given bits_of_keys [B, HEADS, S, QUERY_WORDS]; 0 beyond the last query or key.
    """
    S = aligned(S, CALL)
    across = KEY_WORDS // (KEYS // 32)
    tile, head, batch = program_at(QUERY_WORDS * across, HEADS)
    query_word = tile // across
    column = (tile % across) * KEYS
    r = tl.arange(0, 32)[:, None]
    c = tl.arange(0, KEYS)[None, :]
    t = query_word * 32 + r
    j = column + c
    keep = tl.zeros([32, KEYS], tl.uint32)
    if seen_tile(query_word * 32, column, q_positions, 32, KEYS, CALL):
        given = Given(None, mask, None, q_segments, kv_segments, q_positions, kv_positions, None, None, None, T, S)
        kept = kept_scores(given, batch, head * (CALL.H // HEADS), t, j, column, CALL, False)  # [32, KEYS]
        keep = (kept & (t < T)).to(tl.uint32)
    words = tl.sum(tl.reshape(keep << (c & 31).to(tl.uint32), [32, KEYS // 32, 32]), 2)  # [32, KEYS / 32]
    w = column // 32 + tl.arange(0, KEYS // 32)[None, :]
    at = ((batch * HEADS + head) * T + t) * KEY_WORDS + w
    tl.store(bits + at, words, mask=(t < T) & (w < KEY_WORDS))
    if bits_of_keys is not None:
        of_keys = tl.sum(keep << r.to(tl.uint32), 0)[None, :]  # [1, KEYS]
        at = ((batch * HEADS + head) * S + j) * QUERY_WORDS + query_word
        tl.store(bits_of_keys + at, of_keys, mask=j < S)
