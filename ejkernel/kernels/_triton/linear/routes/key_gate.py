"""A gate per key channel, bfloat16, chunks of 64 rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel.callib import triton_call
from ejkernel.kernels._triton._gluon import HAS_GLUON
from ejkernel.kernels._triton.linear._call import Call, heads, shape
from ejkernel.kernels._triton.linear._chunks import Array, Segments
from ejkernel.kernels._triton.linear._plan import Plan, tile
from ejkernel.kernels._triton.linear.routes.axis import AxisLaunch, axes, gradients, gradients_of_axes, scores_in_blocks
from ejkernel.kernels._triton.linear.routes.route import Changes, Gradients, Route, Saved
from ejkernel.kernels._triton.linear.routes.rows import GatedRows, padded, rows_of_keys
from ejkernel.kernels._triton.linear.routes.scans import (
    Begun,
    Ends,
    Scanned,
    kept_segments,
    scan_rows,
    wide_tiles,
    with_agreed_segments,
)

if HAS_GLUON:
    from ejkernel.kernels._triton.linear.kernels import key_gate_ends, key_gate_warpgroups

STAGE = 64 << 10  # bytes of q, k, v and g of a chunk with 128 channels, of which two are in shared memory
RING = 192 << 10  # bytes of k, v and g of the chunks that are in shared memory for the segments' ends
TILES = 2  # a program of these scans fills a multiprocessor, as two others do
CHANGES: Changes = (
    {"block_d": 32}, {"num_warps": 8}, {"num_warps": 8, "block_d": 32}, {"num_stages": 2}, {"num_stages": 2, "block_d": 32},
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class KeyGate(Route):
    """Gated rows and intra-chunk scores of the key channels are made chunk by chunk. A scan of them makes the outputs and, back
    in time, dv. The gradient of the key channels is then made chunk by chunk.

    On Hopper segments that are weakly gated throughout are scanned before that, from q, k, v and the gate in one kernel, and
    the others are filled up.
    """

    wide_tiles: bool
    title = "key gate"
    covers = "gk or g [B, T, H, K], with or without g and g_gamma per head; K up to 256, bfloat16, chunks of 64"

    @classmethod
    def covering(cls, plan: Plan) -> Route | None:
        gated = "gk" in plan.gates and "gv" not in plan.gates
        if not (gated and plan.bfloat16 and plan.C == 64 and tile(plan.K, 512) <= 256):
            return None
        return cls(plan, wide_tiles(plan, padded(plan.K)))

    @property
    def name(self) -> str:
        return self.title + (", wide tiles" if self.wide_tiles else "")

    def agreed(self, arrays: dict[str, Any], cu_seqlens: Array | None) -> Route:
        """Segments: of those that are scanned in one kernel there are no gated rows to go back along others."""
        if not _in_one_scan(self.plan, arrays):
            return self
        return dataclasses.replace(self, plan=with_agreed_segments(self.plan, arrays, cu_seqlens, TILES))

    def forward(self, call: Call, keep: bool) -> tuple[Array, Array, Saved]:
        q, k, v = call.query_key_value
        begin, output = call.get("initial_state"), call.plan.output
        begun = None
        if _in_one_scan(call.plan, call.arrays):
            begun = _scan_weak_segments(call, q, k, v, begin, output, call.segments(TILES), keep=keep)
        done = None if begun is None else begun.done
        rows = rows_of_keys(call, block_decays=keep, low=keep, done=done)
        scanned = scan_rows(
            call, rows.as_arguments(low=False), v, begin, output, wide=self.wide_tiles, adjoint=False, keep=keep, begun=begun
        )
        if not keep:
            return scanned.output, scanned.final, {}
        # How many segments there were: the size of an array, which goes through `vmap` and `jit` as arrays do.
        cut = None if begun is None or call.cu_seqlens is not None else jnp.zeros(begun.segments.count, jnp.int8)
        return scanned.output, scanned.final, {"states": scanned.states, "keys": rows, "done": done, "segments": cut}

    def backward(self, call: Call, saved: Saved, do: Array, dfinal: Array | None) -> Gradients:
        rows: GatedRows = saved["keys"]
        q, k, v = call.query_key_value
        dtype, done = call.per_head_dtype(v), saved["done"]
        begun = None
        if done is not None:
            cut = saved["segments"]
            segments = call.segments(TILES) if cut is None else kept_segments(call, cut.size)
            begun = _scan_weak_segments(call, k, q, do, dfinal, dtype, segments, adjoint=True, keep=True, done=done)
        # With the low part of the scores: nothing else rounds what goes from do to dv inside a chunk.
        scanned = scan_rows(
            call, rows.as_arguments(low=True, adjoint=True), do, dfinal, dtype, wide=self.wide_tiles, adjoint=True, keep=True,
            begun=begun,
        )  # fmt: skip
        own, other = axes(call, do)
        of_keys, _ = gradients_of_axes(call)
        blocked = scores_in_blocks(call, do, v, rows.gates.weak, call.plan.scale)
        keys = AxisLaunch(call, own, other, rows.gates, None, blocked, saved["states"], scanned.states, of_keys).everywhere()
        return gradients(call, keys, {"dy": scanned.output}, scanned.final)

    def changes(self) -> Changes:
        return CHANGES


def _in_one_scan(plan: Plan, arrays: dict[str, Any]) -> bool:
    """Whether `key_gate_scan_by_warpgroups` scans the weakly gated segments: on Hopper, where nothing else decays and no
    configuration names other tiles."""
    covered = plan.warpgroups and plan.gates == {"gk"} and {plan.K, plan.V} <= {64, 128} and not plan.named_scan_tiles
    return covered and all(arrays[name].dtype == jnp.bfloat16 for name in ("query", "key", "value", "gk"))


def _scan_weak_segments(
    call: Call, q: Array, k: Array, v: Array, begin: Array | None, output: Any, segments: Segments, *, adjoint: bool = False,
    keep: bool, done: Array | None = None,
) -> Begun:  # fmt: skip
    """`key_gate_scan_by_warpgroups` on (q, k, v), or adjoint on (k, q, do) of the segments that `done` says."""
    plan, (B, T, H, _, _), chunks = call.plan, call.dims, call.chunks
    K, V, gk = k.shape[3], v.shape[3], call.arrays["gk"]
    ends = _segment_ends(call, k, v, segments, adjoint)
    # Where rows may be missing, those that copy need more registers for their masks.
    copy, score, value = (24, 168, 160) if chunks.even else (40, 152, 160)
    found = triton_call(
        arguments={
            "q": q, "k": k, "v": v, "g": gk, "begin": begin, "ends": ends.states, "end_decay": ends.key_decays,
            "done_before": done, "scale": plan.scale, **chunks.arguments, **segments.arguments,
        },
        out_shape={
            "o": shape((B, T, H, V), output), "final": shape((call.sequences, H, K, V), np.float32),
            "states": shape((chunks.count, H, K, V), plan.operand) if keep else None,
            "done": shape((chunks.count, H), np.int32) if done is None else None,
        },
        kernel=key_gate_warpgroups.key_gate_scan_by_warpgroups, grid=(segments.count * H,), H=H, HQ=heads(q), HK=heads(k),
        HV=heads(v), HG=heads(gk), K=K, V=V, C=plan.C, SIGN=plan.sign, EVEN=chunks.even, ADJOINT=adjoint,
        LIMIT=plan.weak_limit, STAGES=2 * STAGE // (plan.C * (3 * K + V) * 2), SCORES=2, SPLIT=adjoint, COPY_REGISTERS=copy,
        SCORE_REGISTERS=score, VALUE_REGISTERS=value,
    )  # fmt: skip
    scanned = Scanned(found["o"], found["final"], found.get("states"))
    return Begun(segments, ends, found["done"] if done is None else done, scanned)


def _segment_ends(call: Call, k: Array, v: Array, segments: Segments, adjoint: bool) -> Ends:
    """The ends of the segments of (k, v), or adjoint of (q, the output's adjoint), in a call that `_in_one_scan` covers."""
    if not segments.split:
        return Ends()
    plan, H, chunks, gk = call.plan, call.dims[2], call.chunks, call.arrays["gk"]
    K, V, G = k.shape[3], v.shape[3], segments.count
    found = triton_call(
        arguments={"k": k, "v": v, "g": gk, "scale": plan.scale, **chunks.arguments, **segments.arguments},
        out_shape={"final": shape((G, H, K, V), np.float32), "segment_decay": shape((G, H, K), np.float32)},
        kernel=key_gate_ends.key_gate_segment_ends, grid=(G * H,), H=H, HK=heads(k), HV=heads(v), HG=heads(gk), K=K, V=V,
        C=plan.C, SIGN=plan.sign, EVEN=chunks.even, ADJOINT=adjoint, STAGES=RING // (plan.C * (2 * K + V) * 2),
        COPY_REGISTERS=64, ROW_REGISTERS=192, VALUE_REGISTERS=120,
    )  # fmt: skip
    return Ends(found["final"], found["segment_decay"])
