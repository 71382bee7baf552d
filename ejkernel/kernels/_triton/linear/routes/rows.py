"""Launches that make the gated rows of an axis, bfloat16, chunks of 64 rows: weakly gated chunks first, then the others."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ejkernel.callib import cdiv, triton_call
from ejkernel.kernels._triton.linear._call import Call, heads, shape
from ejkernel.kernels._triton.linear._chunks import Array
from ejkernel.kernels._triton.linear._plan import gate_parts, tile
from ejkernel.kernels._triton.linear.kernels import gated_key_rows, gated_rows, weak_chunks


class GateRange(NamedTuple):
    """How far the log decays of a gate per channel reach in each chunk."""

    weak: Array  # [chunks, H]: 1 where the chunk is weakly gated
    block_decays: Array | None  # [chunks, H, 8, D]: the decay of each block of 8 rows, of the other chunks


class KeyRows(NamedTuple):
    """What the delta rule needs besides: of keys what a gated axis' rows have of queries."""

    scores: Array  # [chunks, H, 64, 64]: of keys with keys
    scores_low: Array
    yd: Array  # [chunks, H, 1, 64, P]: keys times the decays up to each row


class GatedRows(NamedTuple):
    """What is made of a gated axis before its states are scanned: x and y are q and k, or do and v.

    split: 1, or 2: high and low part of bfloat16.
    """

    scores: Array | None  # [chunks, H, 64, 64]: intra-chunk scores of the axis
    scores_low: Array | None  # their low part, if asked for
    xd: Array | None  # [chunks, H, split, 64, P]: x times the decays up to each row
    yd: Array  # [chunks, H, split, 64, P]: y times the decays after each row
    chunk_decay: Array  # [chunks, H, P]
    gates: GateRange
    keys: KeyRows | None = None

    def as_arguments(self, *, low: bool, adjoint: bool = False) -> dict[str, Array | None]:
        """What `scans.scan_rows` reads; low: with the scores' low part."""
        qd, kd = (self.yd, self.xd) if adjoint else (self.xd, self.yd)
        A_low = self.scores_low if low else None
        return {"qd": qd, "kd": kd, "chunk_decay": self.chunk_decay, "A": self.scores, "A_low": A_low}


def padded(channels: int) -> int:
    """P: the channels that gated rows are stored with."""
    return max(32, tile(channels, 512))


def rows_of_keys(call: Call, *, block_decays: bool, low: bool = False, split: int = 1, done: Array | None = None) -> GatedRows:
    """Gated rows of the key channels, with the head's own decay; done: see `weak_rows`."""
    q, k, _ = call.query_key_value
    return rows_of_axis(
        call, q, k, call.arrays["gk"], call.plan.scale, g=call.get("g"), g_gamma=call.get("g_gamma"), low=low,
        block_decays=block_decays, split=split, done=done,
    )  # fmt: skip


def rows_of_values(call: Call, do: Array | None, *, block_decays: bool) -> GatedRows:
    """Gated rows of the value channels in two parts."""
    v, gv = call.arrays["value"], call.arrays["gv"]
    return rows_of_axis(call, do, v, gv, 1.0, g=None, g_gamma=None, block_decays=block_decays, split=2)


def _without(given: dict[str, Any], *names: str) -> dict[str, Any]:
    """Without what a kernel does not take: these names and the memory that they share with outputs."""
    return {name: x for name, x in given.items() if name.removeprefix("filled_") not in names}


def rows_of_axis(
    call: Call, x: Array | None, y: Array, gate: Array, scale: float, *, g: Array | None, g_gamma: Array | None,
    block_decays: bool, low: bool = False, split: int = 1, of_keys: bool = False, done: Array | None = None,
) -> GatedRows:  # fmt: skip
    """Gated rows of an axis.

    Args:
        x: None leaves only what the states and the axis' own rows need.
        split: 2 gives rows and scores in high and low part of bfloat16: what is made of them has only its own rounding.
        of_keys: with `KeyRows`.
        done: see `weak_rows`.
    """
    plan, H, chunks = call.plan, call.dims[2], call.chunks
    D, count, P = y.shape[3], chunks.count, padded(y.shape[3])
    rows, scores = shape((count, H, split, 64, P), plan.operand), shape((count, H, 64, 64), plan.operand)
    out: dict[str, Any] = {
        "A": None if x is None else scores, "A_low": scores if x is not None and (low or split == 2) else None,
        "qd": None if x is None else rows, "kd": rows, "chunk_decay": shape((count, H, P), np.float32),
    }  # fmt: skip
    keys: dict[str, Any] = dict.fromkeys(("M", "M_low", "kp")) if not of_keys else {"M": scores, "M_low": scores, "kp": rows}
    arguments: dict[str, Any] = {"q": x, "k": y, "g": gate, "gs": g, "gamma": g_gamma, "scale": scale, **chunks.arguments}
    common: dict[str, Any] = {
        "H": H, "HQ": heads(x), "HK": heads(y), "HG": heads(gate), "HGS": heads(g), "K": D, "KP": P, "SIGN": plan.sign,
        "EVEN": chunks.even, "SPLIT": split, "num_stages": 1,
    }  # fmt: skip
    BK = 128 if P > 128 else 64  # more at a time when there are several turns: 0.159 against 0.170 ms with 256 channels
    few_registers = BK == 64 and split == 1 and not of_keys  # in two parts 0.209 ms without a limit, 0.228 with it
    filled = triton_call(
        arguments={**arguments, "done": done}, out_shape={**out, **keys, "weak": shape((count, H), np.int32)},
        kernel=weak_chunks.weak_rows, grid=(count, H), BK=min(P, BK), num_warps=4, maxnreg=168 if few_registers else None,
        GATE_PARTS=gate_parts(plan, gate, g, g_gamma), LIMIT=plan.weak_limit, **common,
    )  # fmt: skip
    weak, group = filled.pop("weak"), chunks.together(H)
    arguments |= {"weak": weak, "COUNT": count, **{f"filled_{name}": filled.get(name) for name in (*out, *keys)}}
    out |= {**keys, "block_decays": shape((count, H, 8, D), np.float32) if block_decays else None}
    if of_keys:
        kernel, BK, maxnreg = gated_key_rows.gated_key_rows, 64, None
        arguments, out, common = (_without(of, "gs", "gamma", "A_low", "HGS", "SPLIT") for of in (arguments, out, common))
    else:
        kernel, BK, maxnreg = gated_rows.gated_rows, 128 // split, 160 if P == 64 else None
        arguments, out = (_without(of, "M", "M_low", "kp") for of in (arguments, out))
    found = triton_call(
        arguments=arguments, out_shape=out, kernel=kernel, grid=(cdiv(count, group) * H,), BK=min(P, BK), GROUP=group,
        num_warps=4, maxnreg=maxnreg, input_output_aliases={f"filled_{name}": name for name in filled}, **common,
    )  # fmt: skip
    key_rows = KeyRows(found["M"], found["M_low"], found["kp"]) if of_keys else None
    gates = GateRange(weak, found.get("block_decays"))
    return GatedRows(found.get("A"), found.get("A_low"), found.get("qd"), found["kd"], found["chunk_decay"], gates, key_rows)
