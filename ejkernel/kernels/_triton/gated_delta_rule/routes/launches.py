"""Launches that the routes of the delta rule share: the correction inside chunks and the scans of states."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ejkernel.callib import cdiv, triton_call
from ejkernel.kernels._triton.gated_delta_rule.kernels import correction, scans
from ejkernel.kernels._triton.linear._call import Call, heads, shape
from ejkernel.kernels._triton.linear._chunks import Array, Segments
from ejkernel.kernels._triton.linear._plan import Plan, tile


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


def head_gate_rows(call: Call) -> tuple[Array, Rows]:
    """(Z, rows with their scores) of a call with one gate per head, or none."""
    q, k, _ = call.query_key_value
    H, plan = call.dims[2], call.plan
    scores = shape((call.chunks.count, H, plan.C, plan.C), plan.operand)
    found = _correction(call, {"q": q, "M": None, "M_low": None}, scores)
    return found["Z"], Rows(q, k, found["scores"])


def correction_of(call: Call, scores: Array, scores_low: Array | None = None) -> Array:
    """Z from the scores of keys with keys."""
    return _correction(call, {"q": None, "M": scores, "M_low": scores_low}, None)["Z"]


def _correction(call: Call, given: dict[str, Array | None], scores: Any) -> dict[str, Array]:
    plan, (_, _, H, K, _), chunks = call.plan, call.dims, call.chunks
    k = call.arrays["key"]
    return triton_call(
        arguments={
            **given, "k": k, "gs": call.head_gates["gs"], "beta": call.arrays["beta"], "scale": plan.scale, **chunks.arguments,
        },
        out_shape={"Z": shape((chunks.count, H, plan.C, plan.C), plan.operand), "scores": scores},
        kernel=correction.delta_correction, grid=(chunks.count * H,), HK=heads(k), K=K,
        BK=tile(K, 64 if plan.bfloat16 else 32), EXACT=plan.exact, num_warps=1, num_stages=1, **call.constants(),
    )  # fmt: skip


def value_tile(plan: Plan) -> int:
    """Value channels per program of a scan: what leaves room in registers for a state of all key channels."""
    if plan.block_d is not None:
        return plan.block_d
    if plan.bfloat16:
        return tile(plan.V, 128 if plan.K <= 128 else 64)
    return tile(plan.V, 64 if plan.K <= 64 else 32)


def _scan(call: Call, rows: Rows) -> dict[str, Any]:
    """What both scans are launched with."""
    plan, (_, _, H, K, V) = call.plan, call.dims
    BV = value_tile(plan)
    BK = tile(K, 256) if rows.chunk_decay is None else rows.chunk_decay.shape[2]
    return {
        "grid": (cdiv(V, BV) * _segments(call).count * H,), "HK": heads(call.arrays["key"]), "K": K, "V": V,
        "BK": BK, "BV": BV, "EXACT": plan.exact, "STAGES": plan.num_stages or 2, "num_warps": plan.num_warps or (8 if BV > 64 or BK > 128 else 4),
        "shrink_stages": call.shrinks_stages, **call.constants(),
    }  # fmt: skip


def _segments(call: Call) -> Segments:
    return Segments.whole(call.chunks, call.sequences)


def _arguments(call: Call, rows: Rows, Z: Array, begin: Array | None) -> dict[str, Any]:
    return {
        **rows.as_arguments(), "beta": call.arrays["beta"], "gs": call.head_gates["gs"], "Z": Z, "begin": begin,
        "scale": call.plan.scale, **call.chunks.arguments, **_segments(call).arguments,
    }  # fmt: skip


class Scanned(NamedTuple):
    """What a forward scan leaves."""

    output: Array  # [B, T, H, V]
    final: Array  # [N, H, K, V]
    states: Array | None  # [chunks, H, K, V], if kept
    errors: Array | None  # [B, T, H, V], if kept


def scan(call: Call, rows: Rows, Z: Array, keep: bool) -> Scanned:
    """Outputs and the final state."""
    plan, (B, T, H, K, V) = call.plan, call.dims
    out = {
        "o": shape((B, T, H, V), plan.output), "final": shape((call.sequences, H, K, V), np.float32),
        "states": shape((call.chunks.count, H, K, V), plan.operand) if keep else None,
        "errors": shape((B, T, H, V), plan.operand) if keep else None,
    }  # fmt: skip
    found = triton_call(
        arguments={**_arguments(call, rows, Z, call.get("initial_state")), "v": call.arrays["value"]}, out_shape=out,
        kernel=scans.delta_scan, **_scan(call, rows),
    )  # fmt: skip
    return Scanned(found["o"], found["final"], found.get("states"), found.get("errors"))


class ScannedBack(NamedTuple):
    """What an adjoint scan leaves."""

    value: Array  # dv
    beta: Array
    initial_state: Array
    ends: Array  # [chunks, H, K, V]: the adjoint after every chunk


def scan_back(call: Call, rows: Rows, Z: Array, errors: Array, do: Array, dfinal: Array | None) -> ScannedBack:
    """Gradients of value, beta and the initial state, and what those of query, key and gate start from."""
    plan, (B, T, H, K, V) = call.plan, call.dims
    tiles = cdiv(V, value_tile(plan))
    out = {
        "dv": shape((B, T, H, V), call.arrays["value"].dtype), "dbeta": shape((B, T, H, tiles), np.float32),
        "final": shape((call.sequences, H, K, V), np.float32),
        "states": shape((call.chunks.count, H, K, V), plan.operand),
    }  # fmt: skip
    found = triton_call(
        arguments={**_arguments(call, rows, Z, dfinal), "do": do, "errors": errors}, out_shape=out,
        kernel=scans.delta_adjoint_scan, **_scan(call, rows),
    )  # fmt: skip
    dbeta = found["dbeta"]
    return ScannedBack(found["dv"], dbeta[..., 0] if tiles == 1 else jnp.sum(dbeta, -1), found["final"], found["states"])
