"""Launches of the scans over chunks that several routes share: of states alone, and of gated rows with their outputs."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel._device import may_be_split
from ejkernel._meshes import inside_shard_map
from ejkernel.callib import cdiv, triton_call
from ejkernel.kernels._triton._gluon import HAS_GLUON
from ejkernel.kernels._triton.linear._call import Call, heads, shape
from ejkernel.kernels._triton.linear._chunks import Array, Segments, chunk_counts, segment_length
from ejkernel.kernels._triton.linear._plan import Plan, tile
from ejkernel.kernels._triton.linear.kernels import rows_scan, segment_starts, state_scan

if HAS_GLUON:
    from ejkernel.kernels._triton.linear.kernels import wide_scan_warpgroups

WIDE_SHARED = 202 << 10  # bytes that a program of `scan_rows_wide` takes with two chunks in shared memory
START_TILE = 1024  # elements of a state that a program of `segment_starts` takes
WIDE_KEYS, WIDE_VALUES = 256, 128  # the tile of `scan_rows_wide`


class Ends(NamedTuple):
    """What each segment leaves when it starts from zero; all None where sequences have one segment each."""

    states: Array | None = None  # [segments, H, K, V]; without decays, what each segment starts from
    key_decays: Array | None = None  # [segments, H, K]
    value_decays: Array | None = None  # [segments, H, V], with a gate per value channel


def with_agreed_segments(plan: Plan, arrays: dict[str, Any], cu_seqlens: Array | None, tiles: int) -> Plan:
    """The plan with the length of segments fixed where a mesh may give forward and backward pass other parts of the batch.

    Elsewhere each cuts the batch that it has, and `kept_segments` tells the backward pass how that was.

    Args:
        tiles: into how many the state of the scan is cut.
    """
    if jax.device_count() == 1 or inside_shard_map() or not may_be_split(arrays.values()):
        return plan
    B, T, H, _ = arrays["query"].shape
    B = max(1, B // jax.device_count())  # as many rows as a device may be left with
    N = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
    sequences = B if N is None else N
    counts = chunk_counts(plan, B, T, N)
    length = segment_length(plan, *counts, sequences, sequences * H * tiles, packed=N is not None)
    return dataclasses.replace(plan, segment=max(1, length))


def kept_segments(call: Call, count: int) -> Segments:
    """The segments of a dense call's forward pass, which had `count` of them.

    `vmap` over cotangents alone gives the backward pass another batch, which it would cut otherwise.
    """
    per = count // call.sequences
    return Segments.dense(call.chunks, call.sequences, cdiv(call.chunks.per_sequence, per))


def _state_scan(
    call: Call, a: Array, b: Array, adjoint: bool, segments: Segments | None, *, ends: bool = False
) -> tuple[Segments, dict[str, Any], dict[str, Any]]:
    """(segments, arguments, everything else) that the launches of `state_scan` share."""
    plan, (_, _, H, K, V) = call.plan, call.dims
    wide = 64 if plan.bfloat16 else 32
    by_head = plan.per_head and plan.bfloat16  # which takes few registers
    BA, BB = plan.block_k or tile(K, 2 * wide if by_head else wide), plan.block_d or tile(V, wide)
    stages, warps = plan.num_stages or 3, plan.num_warps or 4
    packed = call.chunks.tables is not None
    if ends and packed and by_head and plan.warpgroups and not plan.named_scan_tiles and (BA, BB, V) == (128, 64, 128):
        # All of a state in one program, so that `a` is read once: 0.044 for 0.050 ms. Dense segments gain nothing.
        BB, stages, warps = V, 4, 8
    tiles = cdiv(K, BA) * cdiv(V, BB)
    segments = call.segments(tiles) if segments is None else segments
    gk, gv = call.get("gk"), call.get("gv")
    arguments = {
        "xa": a, "xb": b, "ga": gk, "gb": gv, **call.head_gates, "scale": plan.scale if adjoint else 1.0,
        **call.chunks.arguments, **segments.arguments,
    }  # fmt: skip
    options: dict[str, Any] = dict(
        call.constants(), HA=heads(a), HB=heads(b), HGA=heads(gk), HGB=heads(gv), DA=K, DB=V, BA=BA, BB=BB, ADJOINT=adjoint,
        GATE_PARTS=call.gate_parts, EXACT=plan.exact, STAGES=stages, num_warps=warps, shrink_stages=call.shrinks_stages,
        kernel=state_scan.state_scan, grid=(tiles * segments.count * H,),
    )  # fmt: skip
    return segments, arguments, options


def segment_ends(call: Call, a: Array, b: Array, segments: Segments, *, adjoint: bool = False) -> Ends:
    """The ends of the given segments, by a scan of (key, value), or adjoint of (query, the output's adjoint)."""
    if not segments.split:
        return Ends()
    _, arguments, options = _state_scan(call, a, b, adjoint, segments, ends=True)
    _, _, H, K, V = call.dims
    G = segments.count
    out = {
        "states": None,
        "final": shape((G, H, K, V), np.float32),
        "segment_decay_a": shape((G, H, K), np.float32),
        "segment_decay_b": None if call.get("gv") is None else shape((G, H, V), np.float32),
    }
    nothing = dict.fromkeys(("begin", "ends", "end_decay_a", "end_decay_b"))
    found = triton_call(arguments={**arguments, **nothing}, out_shape=out, **options)
    return Ends(found["final"], found["segment_decay_a"], found.get("segment_decay_b"))


def starts_of_segments(call: Call, begin: Array | None, ends: Ends, segments: Segments, *, adjoint: bool) -> Ends:
    """What segments start from, of one decay each; begin: the sequences' own states, or the adjoints at their ends."""
    states, decays, H = ends.states, ends.key_decays, call.dims[2]
    assert states is not None
    assert decays is not None
    size = states.shape[2] * states.shape[3]
    B = min(START_TILE, size)
    found = triton_call(
        arguments={
            "begin": begin, "ends": states, "end_decay": decays, "NT": call.chunks.per_sequence, **segments.arguments,
        },
        out_shape={"starts": shape(states.shape, np.float32)}, kernel=segment_starts.segment_starts,
        grid=(cdiv(size, B) * segments.count * H,), H=H, SIZE=size, DECAYS=decays.shape[2], B=B, ADJOINT=adjoint, STAGES=4,
        num_warps=4,
    )  # fmt: skip
    return Ends(found["starts"])


def scan_states(call: Call, a: Array, b: Array, begin: Array | None, *, adjoint: bool = False) -> tuple[Array, Array]:
    """(state before every chunk, state at the end) from (key, value).

    Adjoint, from (query, the output's adjoint): (adjoint after every chunk, gradient of the initial state).
    """
    segments, arguments, options = _state_scan(call, a, b, adjoint, None)
    ends = segment_ends(call, a, b, segments, adjoint=adjoint)
    _, _, H, K, V = call.dims
    before = {"begin": begin, "ends": ends.states, "end_decay_a": ends.key_decays, "end_decay_b": ends.value_decays}
    out = {
        "states": shape((call.chunks.count, H, K, V), call.plan.operand),
        "final": shape((call.sequences, H, K, V), np.float32),
        "segment_decay_a": None,
        "segment_decay_b": None,
    }
    found = triton_call(arguments={**arguments, **before}, out_shape=out, **options)
    return found["states"], found["final"]


class Scanned(NamedTuple):
    """What a scan of gated rows leaves."""

    output: Array  # [B, T, H, V]
    final: Array  # [N, H, K, V]
    states: Array | None  # [chunks, H, K, V], if kept


class Begun(NamedTuple):
    """A scan that has done the weakly gated segments."""

    segments: Segments
    ends: Ends
    done: Array  # [chunks, H]: not 0 in the segments that it has done
    scanned: Scanned


def wide_tiles(plan: Plan, key_channels: int) -> bool:
    """Whether `scan_rows_wide` scans rows of so many (padded) key channels.

    It does where two chunks fit in shared memory and no configuration names tiles of its own.
    """
    return key_channels == WIDE_KEYS and plan.V > 64 and not plan.named_scan_tiles and plan.shared >= WIDE_SHARED


def _wide_scan(plan: Plan, v: Array, common: dict[str, Any]) -> dict[str, Any]:
    """The kernel that scans wide tiles, and its constants, of those that all scans of gated rows have."""
    whole = plan.K == WIDE_KEYS and plan.V % WIDE_VALUES == 0 and v.dtype == jnp.bfloat16
    if not (plan.warpgroups and whole):
        return {"kernel": rows_scan.scan_rows_wide, "BV": WIDE_VALUES, "STAGES": 2, "num_warps": 8, **common}
    kept = {name: common[name] for name in ("H", "HV", "V", "SIGN", "EVEN", "ADJOINT")}
    return {
        "kernel": wide_scan_warpgroups.wide_scan_by_warpgroups, "C": plan.C, "STAGES": 2, "COPY_REGISTERS": 56,
        "VALUE_REGISTERS": 224, **kept,
    }  # fmt: skip


def scan_rows(
    call: Call, rows: dict[str, Array | None], v: Array, begin: Array | None, output: Any, *, wide: bool, adjoint: bool,
    keep: bool, begun: Begun | None = None,
) -> Scanned:  # fmt: skip
    """Outputs of chunks from their gated rows, with the state in registers.

    Args:
        rows: qd, kd, chunk_decay, A and A_low (which may be None) of the kernel. Adjoint: qd and kd in each other's place.
            Wide, where qd is q itself: also q_decay.
        v: the values. Adjoint: the output's adjoint.
        output: dtype of the outputs.
        wide: by `scan_rows_wide`.
        keep: keep the states, too.
        begun: the segments that are done already: their results are filled up. Not with `wide`.
    """
    plan, (B, T, H, K, V), chunks = call.plan, call.dims, call.chunks
    chunk_decay = rows["chunk_decay"]
    assert chunk_decay is not None
    KP = chunk_decay.shape[2]
    BV = plan.block_d or tile(V, 64)
    segments = call.segments(cdiv(V, WIDE_VALUES if wide else BV)) if begun is None else begun.segments
    q_decay = rows.get("q_decay")
    rows = {name: x for name, x in rows.items() if name != "q_decay"}
    arguments = {**rows, "v": v, **chunks.arguments, **segments.arguments}
    common: dict[str, Any] = {
        "H": H, "SIGN": plan.sign, "EVEN": chunks.even, "K": K, "KP": KP, "HV": heads(v), "V": V, "ADJOINT": adjoint,
        "shrink_stages": call.shrinks_stages,
    }  # fmt: skip
    narrow: dict[str, Any] = {
        "kernel": rows_scan.scan_rows, "grid": (cdiv(V, BV) * segments.count * H,), "BV": BV,
        "STAGES": plan.num_stages or (3 if KP <= 128 else 1), "num_warps": plan.num_warps or 4,
    }  # fmt: skip
    not_begun = dict.fromkeys(("done", "filled_o", "filled_final", "filled_states"))
    ends = Ends() if begun is None else begun.ends
    if segments.split and begun is None:
        G = segments.count
        out = {
            "o": None, "final": shape((G, H, K, V), np.float32), "states": None,
            "segment_decay": shape((G, H, K), np.float32),
        }  # fmt: skip
        nothing = dict.fromkeys(("begin", "ends", "end_decay"))
        found = triton_call(arguments={**arguments, **nothing, **not_begun}, out_shape=out, **narrow, **common)
        ends = Ends(found["final"], found["segment_decay"])
    arguments |= {"begin": begin, "ends": ends.states, "end_decay": ends.key_decays}
    out = {
        "o": shape((B, T, H, V), output), "final": shape((call.sequences, H, K, V), np.float32),
        "states": shape((chunks.count, H, K, V), plan.operand) if keep else None,
    }  # fmt: skip
    if wide:
        found = triton_call(
            arguments={**arguments, "q_decay": q_decay}, out_shape=out, ALIKE=plan.per_head,
            grid=(cdiv(V, WIDE_VALUES) * segments.count * H,), **_wide_scan(plan, v, common),
        )  # fmt: skip
    else:
        aliases = {}
        if begun is None:
            arguments |= not_begun
        else:
            o, final, states = begun.scanned
            arguments |= {"done": begun.done, "filled_o": o, "filled_final": final, "filled_states": states}
            aliases = {f"filled_{name}": name for name in ("o", "final", "states") if out[name] is not None}
        found = triton_call(
            arguments=arguments, out_shape={**out, "segment_decay": None}, input_output_aliases=aliases, **narrow, **common
        )
    return Scanned(found["o"], found["final"], found.get("states"))
