"""Launches that the routes of the delta rule share: the correction inside chunks and the scans of states."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ejkernel.callib import cdiv, triton_call
from ejkernel.kernels._triton.gated_delta_rule.kernels import scans
from ejkernel.kernels._triton.gated_delta_rule.kernels.correction import delta_correction
from ejkernel.kernels._triton.linear._call import Call, heads, shape
from ejkernel.kernels._triton.linear._chunks import Array, Segments
from ejkernel.kernels._triton.linear._plan import Plan, tile

ROOMY = 200 << 10  # bytes of shared memory: an H100 has more, an A100 less


class Rows(NamedTuple):
    """What the scans read of query and key. With a gate per key channel prepared rows, [chunks, H, C, P]; else as they came."""

    query: Array
    key: Array
    scores: Array  # [chunks, H, C, C]: of queries with keys
    key_after: Array | None = None
    chunk_decay: Array | None = None  # [chunks, H, P]

    def as_arguments(self) -> dict[str, Array | None]:
        return {
            "q": self.query, "k": self.key, "ks": self.key_after, "N": self.scores, "chunk_decay": self.chunk_decay,
        }  # fmt: skip


class Correction(NamedTuple):
    """How the rows of a chunk correct each other's errors, [chunks, H, C, C]."""

    Z: Array
    key_scores: Array | None  # where products are as good as float32's: to refine the errors once


def head_gate_rows(call: Call) -> tuple[Correction, Rows]:
    """What the scans of a call with one gate per head, or none, read."""
    q, k, _ = call.query_key_value
    found = _correction(call, {"q": q, "M": None, "M_low": None}, with_scores=True)
    return Correction(found["Z"], found.get("key_scores")), Rows(q, k, found["scores"])


def correction_of(call: Call, scores: Array, scores_low: Array | None = None) -> Correction:
    """From the scores of keys with keys."""
    found = _correction(call, {"q": None, "M": scores, "M_low": scores_low}, with_scores=False)
    return Correction(found["Z"], found.get("key_scores"))


def _correction(call: Call, given: dict[str, Array | None], with_scores: bool) -> dict[str, Array]:
    plan, (_, _, H, K, _), chunks = call.plan, call.dims, call.chunks
    k = call.arrays["key"]
    matrix = shape((chunks.count, H, plan.C, plan.C), plan.operand)
    return triton_call(
        arguments={
            **given, "k": k, "gs": call.head_gates["gs"], "beta": call.arrays["beta"], "scale": plan.scale, **chunks.arguments,
        },
        out_shape={"Z": matrix, "scores": matrix if with_scores else None, "key_scores": matrix if plan.exact else None},
        kernel=delta_correction, grid=(chunks.count * H,), HK=heads(k), K=K,
        BK=tile(K, 64 if plan.bfloat16 else 32), EXACT=plan.exact, num_warps=1, num_stages=1, **call.constants(),
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


def _scan(call: Call, rows: Rows, BV: int, adjoint: bool) -> dict[str, Any]:
    """What both scans are launched with."""
    plan, (_, _, H, K, V) = call.plan, call.dims
    BK = tile(K, 256) if rows.chunk_decay is None else rows.chunk_decay.shape[2]
    return {
        "grid": (cdiv(V, BV) * _segments(call).count * H,), "HK": heads(call.arrays["key"]), "K": K, "V": V, "BK": BK,
        "BV": BV, "EXACT": plan.exact, "STAGES": plan.num_stages or _stages(plan, rows, adjoint),
        "num_warps": plan.num_warps or (8 if BV > 64 or BK > 128 else 4), "shrink_stages": call.shrinks_stages,
        "maxnreg": 255,  # said, since ptxas takes 32 by itself for sm_80 and spills everything else
        **call.constants(),
    }  # fmt: skip


def _segments(call: Call) -> Segments:
    return Segments.whole(call.chunks, call.sequences)


def _arguments(call: Call, rows: Rows, correction: Correction, begin: Array | None) -> dict[str, Any]:
    return {
        **rows.as_arguments(), "beta": call.arrays["beta"], "gs": call.head_gates["gs"], "Z": correction.Z,
        "M": correction.key_scores, "begin": begin,
        "scale": call.plan.scale, **call.chunks.arguments, **_segments(call).arguments,
    }  # fmt: skip


class Scanned(NamedTuple):
    """What a forward scan leaves."""

    output: Array  # [B, T, H, V]
    final: Array  # [N, H, K, V]
    states: Array | None  # [chunks, H, K, V], if kept
    errors: Array | None  # [B, T, H, V], if kept


def scan(call: Call, rows: Rows, correction: Correction, keep: bool) -> Scanned:
    """Outputs and the final state."""
    plan, (B, T, H, K, V) = call.plan, call.dims
    out = {
        "o": shape((B, T, H, V), plan.output), "final": shape((call.sequences, H, K, V), np.float32),
        "states": shape((call.chunks.count, H, K, V), plan.operand) if keep else None,
        "errors": shape((B, T, H, V), plan.operand) if keep else None,
    }  # fmt: skip
    found = triton_call(
        arguments={**_arguments(call, rows, correction, call.get("initial_state")), "v": call.arrays["value"]}, out_shape=out,
        kernel=scans.delta_scan, **_scan(call, rows, value_tile(plan, 64 if rows.key_after is None else 128), adjoint=False),
    )  # fmt: skip
    return Scanned(found["o"], found["final"], found.get("states"), found.get("errors"))


class ScannedBack(NamedTuple):
    """What an adjoint scan leaves."""

    value: Array  # dv
    beta: Array
    initial_state: Array
    ends: Array  # [chunks, H, K, V]: the adjoint after every chunk


def scan_back(call: Call, rows: Rows, correction: Correction, errors: Array, do: Array, dfinal: Array | None) -> ScannedBack:
    """Gradients of value, beta and the initial state, and what those of query, key and gate start from."""
    plan, (B, T, H, K, V) = call.plan, call.dims
    BV = value_tile(plan, 128)
    tiles = cdiv(V, BV)
    out = {
        "dv": shape((B, T, H, V), call.arrays["value"].dtype), "dbeta": shape((B, T, H, tiles), np.float32),
        "final": shape((call.sequences, H, K, V), np.float32),
        "states": shape((call.chunks.count, H, K, V), plan.operand),
    }  # fmt: skip
    found = triton_call(
        arguments={**_arguments(call, rows, correction, dfinal), "do": do, "errors": errors}, out_shape=out,
        kernel=scans.delta_adjoint_scan, **_scan(call, rows, BV, adjoint=True),
    )  # fmt: skip
    dbeta = found["dbeta"]
    return ScannedBack(found["dv"], dbeta[..., 0] if tiles == 1 else jnp.sum(dbeta, -1), found["final"], found["states"])
