"""What every kernel of softmax attention gets of a call beside its operands, by name."""

from __future__ import annotations

from typing import Any, NamedTuple


class Plane(NamedTuple):
    """The axes of a mask or a bias [1|B, heads, 1|T, 1|S]: 1 where it varies over batch, queries, keys, else 0."""

    BATCH: int
    HEADS: int
    QUERIES: int
    KEYS: int


class Call(NamedTuple):
    """What is compiled in.

    Attributes:
        H, HK: heads of queries, and of keys and values.
        D, DV: channels of keys and of values; BD and BDV are the tiles that cover them.
        PREC: the precision of products.
        LEFT, RIGHT: keys that a query sees, from t - LEFT to t + RIGHT, by indices or positions; None: all.
        BIAS, MASK: the axes of these planes; None: there is none.
        PACKED: whether the mask comes as bits, with all else that masks in them, see packing.py.
        IDS_VARY: 1 where segments and positions differ over the batch, else 0.
        SINKS_VARY, SCALE_VARIES: 1 where these differ over the batch: [B, H] and [B], else 0: [H] and [].
        CAPPED: whether there is a soft cap; CAPPED_NEAR_0: whether scores far below it need their digits, see `logits`.
        DROPPED: dropout keeps the weights whose random bits are at least this.
        SURVIVES: what dropout multiplies a kept weight by.
        FUSED: the scale is multiplied where the maximum is subtracted: no cap, no bias.
        EXACT: float32: scores come scaled, and logits are in base e.
        QUERIES_DIVIDE, KEYS_DIVIDE: powers of two that divide T and S: tiles of these need no bounds, see also `aligned`.
        SHARED: whether the rows of the batch share a bias; TOGETHER: heads whose programs take turns. See `program_at`.
    """

    H: int
    HK: int
    D: int
    DV: int
    BD: int
    BDV: int
    PREC: str
    LEFT: int | None
    RIGHT: int | None
    BIAS: Plane | None
    MASK: Plane | None
    PACKED: bool
    IDS_VARY: int
    SINKS_VARY: int
    SCALE_VARIES: int
    CAPPED: bool
    CAPPED_NEAR_0: bool
    DROPPED: int
    SURVIVES: float
    FUSED: bool
    EXACT: bool
    QUERIES_DIVIDE: int
    KEYS_DIVIDE: int
    SHARED: bool
    TOGETHER: int


class Given(NamedTuple):
    """What is known when a kernel runs, None for what there is not.

    `mask` is a boolean plane, or bits [1|B, heads, T, words] of PACKED calls; `mask_of_keys` then is [1|B, heads, S, words].
    `factor` is the scale in the logits' base.
    """

    bias: Any
    mask: Any
    mask_of_keys: Any
    q_segments: Any
    kv_segments: Any
    q_positions: Any
    kv_positions: Any
    words: Any
    factor: Any
    cap: Any
    T: Any
    S: Any
