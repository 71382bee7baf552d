"""Launches that the routes of the delta rule share: the correction inside chunks and the scans of states."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ejkernel.callib import cdiv, triton_call
from ejkernel.kernels._triton._gluon import HAS_GLUON
from ejkernel.kernels._triton.gated_delta_rule.kernels import scans, segment_ends
from ejkernel.kernels._triton.gated_delta_rule.kernels.correction import delta_correction
from ejkernel.kernels._triton.linear._call import Call, heads, shape
from ejkernel.kernels._triton.linear._chunks import Array, Segments
from ejkernel.kernels._triton.linear._plan import Plan, tile
from ejkernel.kernels._triton.linear.routes.route import Saved

if HAS_GLUON:
    from ejkernel.kernels._triton.gated_delta_rule.kernels import correction_in_registers, scans_by_warpgroups

ROOMY = 200 << 10  # bytes of shared memory: an H100 has more, an A100 less
RING = 220 << 10  # of it, on Hopper, for chunks that are copied ahead and for results on their way out


class Rows(NamedTuple):
    """What the scans read of query and key. With a gate per key channel prepared rows, [chunks, H, C, P]; else as they came."""

    query: Array
    key: Array
    scores: Array | None  # [chunks, H, C, C]: of queries with keys; None where a scan makes them itself
    key_after: Array | None = None
    chunk_decay: Array | None = None  # [chunks, H, P]

    def as_arguments(self) -> dict[str, Array | None]:
        return {
            "q": self.query, "k": self.key, "ks": self.key_after, "N": self.scores, "chunk_decay": self.chunk_decay,
        }  # fmt: skip


class Correction(NamedTuple):
    """How the rows of a chunk correct each other's errors, [chunks, H, C, C]."""

    Z: Array
    betas: Array  # [chunks, H, C]
    key_scores: Array | None  # [chunks, H, 2, C, C], where products are as good as float32's: to refine the errors once


def head_gate_rows(call: Call, with_scores: bool = True) -> tuple[Correction, Rows]:
    """What the scans of a call with one gate per head, or none, read; without scores where a scan makes them itself."""
    q, k, _ = call.query_key_value
    found = _correction(call, {"q": q if with_scores else None, "M": None, "M_low": None}, with_scores)
    return Correction(found["Z"], found["betas"], found.get("key_scores")), Rows(q, k, found.get("scores"))


def correction_of(call: Call, scores: Array, scores_low: Array | None = None) -> Correction:
    """From the scores of keys with keys."""
    plan = call.plan
    if HAS_GLUON and plan.bfloat16 and plan.C == 64:
        return _correction_in_registers(call, scores, scores_low)
    found = _correction(call, {"q": None, "M": scores, "M_low": scores_low}, with_scores=False)
    return Correction(found["Z"], found["betas"], found.get("key_scores"))


def _correction_in_registers(call: Call, scores: Array, scores_low: Array | None) -> Correction:
    plan, H, chunks = call.plan, call.dims[2], call.chunks
    found = triton_call(
        arguments={"beta": call.arrays["beta"], "M": scores, "M_low": scores_low, **chunks.arguments},
        out_shape={
            "Z": shape((chunks.count, H, plan.C, plan.C), plan.operand), "betas": shape((chunks.count, H, plan.C), np.float32),
        },
        kernel=correction_in_registers.delta_correction_in_registers, grid=(chunks.count * H,), H=H, C=plan.C, SIGN=plan.sign,
        num_warps=1,
    )  # fmt: skip
    return Correction(found["Z"], found["betas"], None)


def _correction(call: Call, given: dict[str, Array | None], with_scores: bool) -> dict[str, Array]:
    plan, (_, _, H, K, _), chunks = call.plan, call.dims, call.chunks
    k = call.arrays["key"]
    matrix = shape((chunks.count, H, plan.C, plan.C), plan.operand)
    wide = shape((chunks.count, H, 2, plan.C, plan.C), np.float32)
    # Key channels a turn. There are two turns at least, so that one's are copied while the other's are multiplied.
    turn = 16 if not plan.bfloat16 else 64 if K > 64 else 32
    return triton_call(
        arguments={
            **given, "k": k, "gs": call.head_gates["gs"], "beta": call.arrays["beta"], "scale": plan.scale, **chunks.arguments,
        },
        out_shape={
            "Z": matrix, "scores": matrix if with_scores else None, "key_scores": wide if plan.exact else None,
            "betas": shape((chunks.count, H, plan.C), np.float32),
        },
        kernel=delta_correction, grid=(chunks.count * H,), HK=heads(k), K=K, EXACT=plan.exact, num_warps=1, num_stages=1,
        BK=tile(K, turn), STAGES=2 if plan.bfloat16 else 1, **call.constants(),
    )  # fmt: skip


def value_tile(plan: Plan, most: int) -> int:
    """Value channels per program of a scan: what leaves room in registers for a state of all key channels."""
    if plan.block_d is not None:
        return plan.block_d
    if plan.bfloat16:
        return tile(plan.V, most if plan.K <= 128 else 64)
    return tile(plan.V, 64 if plan.K <= 64 else 32)


def _stages(plan: Plan, rows: Rows, adjoint: bool) -> int:
    """Chunks in flight: as many as shared memory has room for, measured best on an H200."""
    prepared, roomy = rows.key_after is not None, plan.shared > ROOMY
    if plan.K > 128:
        return 2 if roomy and not prepared else 1
    return 3 if adjoint and roomy and not prepared else 2


def _scan(call: Call, rows: Rows, segments: Segments, BV: int, adjoint: bool) -> dict[str, Any]:
    """What all scans are launched with."""
    plan, (_, _, H, K, V) = call.plan, call.dims
    BK = tile(K, 256) if rows.chunk_decay is None else rows.chunk_decay.shape[2]
    return {
        "grid": (cdiv(V, BV) * segments.count * H,), "HK": heads(call.arrays["key"]), "K": K, "V": V, "BK": BK,
        "BV": BV, "EXACT": plan.exact, "STAGES": plan.num_stages or _stages(plan, rows, adjoint),
        "num_warps": plan.num_warps or (8 if BV > 64 or BK > 128 else 4), "shrink_stages": call.shrinks_stages,
        "maxnreg": 255,  # named, since ptxas takes 32 by itself for sm_80 and spills everything else
        **call.constants(),
    }  # fmt: skip


def by_warpgroups(plan: Plan) -> bool:
    """Whether the scans are those of `scans_by_warpgroups`: on Hopper, where no configuration names other tiles."""
    covered = plan.warpgroups and plan.bfloat16 and plan.C == 64 and {plan.K, plan.V} <= {64, 128}
    return covered and not plan.named_scan_tiles


def _scan_by_warpgroups(call: Call, rows: Rows, segments: Segments, keep: bool, adjoint: bool) -> dict[str, Any]:
    """What the scans of `scans_by_warpgroups` are launched with. Two chunks in flight are enough where much is written."""
    C, (_, _, H, K, V) = call.plan.C, call.dims
    key_rows, value_rows = (2 if rows.key_after is None else 3), (2 if adjoint else 1)
    chunk = 2 * C * (key_rows * K + value_rows * V + 2 * C) + 4 * (3 * C + K)  # bytes
    pair, even = V > 64, call.chunks.even  # pair: two warpgroups share the value channels
    # Where rows may be missing, their masks take registers of those that copy: 0.269 ms for 0.352 where they have enough (the
    # scan of packed 32768 tokens, 16 heads of 128 x 128, H200), 0.414 where the values then have too few.
    if rows.key_after is not None:
        copy, value = (40, 232) if even else (56, 224)
    elif rows.scores is None:  # those that copy make them
        copy, value = (104, 216) if not pair else (72, 216) if even else (88, 208)
    else:
        copy, value = 72, 216
    return {
        "grid": (segments.count * H,), "H": H, "HK": heads(call.arrays["key"]), "K": K, "V": V, "C": C, "SIGN": call.plan.sign,
        "EVEN": even, "STAGES": min(2 if keep and pair else 4, (RING - 2 * C * V) // chunk), "COPY_REGISTERS": copy,
        "VALUE_REGISTERS": value,
    }  # fmt: skip


def _arguments(call: Call, rows: Rows, correction: Correction, segments: Segments) -> dict[str, Any]:
    return {
        **rows.as_arguments(), "betas": correction.betas, "gs": call.head_gates["gs"], "Z": correction.Z,
        "M": correction.key_scores, "scale": call.plan.scale, **call.chunks.arguments, **segments.arguments,
    }  # fmt: skip


def _segments(call: Call) -> Segments:
    """The same for all scans of a call: adjoints go back through the segments' transitions."""
    length = call.plan.segment
    assert length is not None
    if call.chunks.tables is not None:
        return Segments.packed(call.chunks, length)
    return Segments.dense(call.chunks, call.sequences, length)


def _split(call: Call, segments: Segments) -> bool:
    """Whether a sequence may have several segments."""
    return segments.split and segments.length < call.chunks.count


def _transitions(
    call: Call, rows: Rows, correction: Correction, segments: Segments, keep: bool
) -> tuple[Array | None, Array | None]:
    """(U [segments, H, K, V], M [segments, H, K, K]) of `delta_segment_ends`; None where sequences have one segment each."""
    if not _split(call, segments):
        return None, None
    plan, (_, _, H, K, V) = call.plan, call.dims
    BV = value_tile(plan, 64)
    arguments = _arguments(call, rows, correction, segments)
    unread = ("q", "N", "scale")
    options = _scan(call, rows, segments, BV, adjoint=False)
    found = triton_call(
        arguments={**{name: x for name, x in arguments.items() if name not in unread}, "v": call.arrays["value"]},
        out_shape={
            "ends": shape((segments.count, H, K, V), np.float32), "transitions": shape((segments.count, H, K, K), plan.operand),
        },
        kernel=segment_ends.delta_segment_ends,
        **{**options, "grid": ((cdiv(V, BV) + cdiv(K, BV)) * segments.count * H,), "LAST": keep},
    )  # fmt: skip
    return found["ends"], found["transitions"]


def _starts(
    call: Call, segments: Segments, begin: Array | None, ends: Array | None, transitions: Array | None, adjoint: bool
) -> Array | None:
    """What segments start from, [segments, H, K, V]; None where each sequence has one."""
    if ends is None:
        return None
    plan, (_, _, H, K, V) = call.plan, call.dims
    BV = tile(V, 32 if plan.bfloat16 and K <= 128 else 16)
    return triton_call(
        arguments={
            "begin": begin, "ends": ends, "transitions": transitions, "NT": call.chunks.per_sequence, **segments.arguments,
        },
        out_shape={"starts": shape((segments.count, H, K, V), np.float32)}, kernel=segment_ends.delta_segment_starts,
        grid=(cdiv(V, BV) * segments.count * H,), H=H, K=K, V=V, BK=tile(K, 256), BV=BV, ADJOINT=adjoint, PREC=plan.precision,
        STAGES=2 if K <= 128 else 1, num_warps=4, shrink_stages=True,
    )["starts"]  # fmt: skip


class Scanned(NamedTuple):
    """What a forward scan leaves."""

    output: Array  # [B, T, H, V]
    final: Array  # [N, H, K, V]
    states: Array | None  # [chunks, H, K, V], if kept
    errors: Array | None  # [B, T, H, V], if kept
    transitions: Array | None  # [segments, H, K, K], where sequences may have several segments
    scores: Array | None  # of queries with keys, where the scan has made and kept them

    def kept(self, correction: Correction) -> Saved:
        """What `scan_back` and the gradients of chunks read."""
        return {
            "correction": correction, "states": self.states, "errors": self.errors, "transitions": self.transitions,
        }  # fmt: skip


def scan(call: Call, rows: Rows, correction: Correction, keep: bool) -> Scanned:
    """Outputs and the final state."""
    plan, (B, T, H, K, V), segments = call.plan, call.dims, _segments(call)
    ends, transitions = _transitions(call, rows, correction, segments, keep)
    begin = call.get("initial_state")
    starts = _starts(call, segments, begin, ends, transitions, adjoint=False)
    out = {
        "o": shape((B, T, H, V), plan.output), "final": shape((call.sequences, H, K, V), np.float32),
        "states": shape((call.chunks.count, H, K, V), plan.operand) if keep else None,
        "errors": shape((B, T, H, V), plan.operand) if keep else None,
    }  # fmt: skip
    arguments = {
        **_arguments(call, rows, correction, segments), "begin": begin, "starts": starts, "v": call.arrays["value"],
    }  # fmt: skip
    options: dict[str, Any]
    if by_warpgroups(plan):
        del arguments["M"]
        # Of 128 value channels the adjoint scan would wait for scores that it makes itself: 0.174 ms for 0.140 (r1, H200).
        kept = shape((call.chunks.count, H, plan.C, plan.C), plan.operand) if keep and rows.scores is None and V > 64 else None
        out["scores"] = kept
        options = {
            "kernel": scans_by_warpgroups.delta_scan_by_warpgroups,
            **_scan_by_warpgroups(call, rows, segments, keep, adjoint=False),
        }
    else:
        BV = value_tile(plan, 64 if rows.key_after is None else 128)
        options = {"kernel": scans.delta_scan, **_scan(call, rows, segments, BV, adjoint=False)}
    found = triton_call(arguments=arguments, out_shape=out, **options)
    return Scanned(
        found["o"], found["final"], found.get("states"), found.get("errors"), transitions, found.get("scores", rows.scores)
    )


class ScannedBack(NamedTuple):
    """What an adjoint scan leaves."""

    value: Array  # dv
    beta: Array
    initial_state: Array
    ends: Array  # [chunks, H, K, V]: the adjoint after every chunk


def scan_back(call: Call, rows: Rows, saved: Saved, do: Array, dfinal: Array | None) -> ScannedBack:
    """Gradients of value, beta and the initial state, and what those of query, key and gate start from."""
    plan, (B, T, H, K, V), segments = call.plan, call.dims, _segments(call)
    arguments = {**_arguments(call, rows, saved["correction"], segments), "do": do}
    options: dict[str, Any]
    if by_warpgroups(plan):
        del arguments["M"]
        tiles = 1
        options = {
            "kernel": scans_by_warpgroups.delta_adjoint_scan_by_warpgroups,
            **_scan_by_warpgroups(call, rows, segments, keep=True, adjoint=True),
        }
    else:
        BV = value_tile(plan, 128)
        tiles = cdiv(V, BV)
        options = {"kernel": scans.delta_adjoint_scan, **_scan(call, rows, segments, BV, adjoint=True)}
    ends = None
    if _split(call, segments):
        nothing = dict.fromkeys(("dv", "dbeta", "states"))
        out = {**nothing, "final": shape((segments.count, H, K, V), np.float32)}
        ends = triton_call(
            arguments={**arguments, "begin": None, "starts": None, "errors": None}, out_shape=out, **options,
        )["final"]  # fmt: skip
    starts = _starts(call, segments, dfinal, ends, saved["transitions"], adjoint=True)
    out = {
        "dv": shape((B, T, H, V), call.arrays["value"].dtype),
        "dbeta": shape((B, T, H, tiles), call.arrays["beta"].dtype if tiles == 1 else np.float32),
        "final": shape((call.sequences, H, K, V), np.float32),
        "states": shape((call.chunks.count, H, K, V), plan.operand),
    }  # fmt: skip
    arguments |= {"begin": dfinal, "starts": starts, "errors": saved["errors"]}
    found = triton_call(arguments=arguments, out_shape=out, **options)
    dbeta = found["dbeta"]
    return ScannedBack(found["dv"], dbeta[..., 0] if tiles == 1 else jnp.sum(dbeta, -1), found["final"], found["states"])
