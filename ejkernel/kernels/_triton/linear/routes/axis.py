"""The key or the value channels of a call with gates per channel, and the launches that compute one axis from the other.

key channels     x = q,  y = k     -> dx = dq, dy = dk, gradient of the key gate       other scores: scale do v^T
value channels   x = do, y = v     -> dx = o,  dy = dv, gradient of the value gate     other scores: scale q k^T
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.callib import cdiv, triton_call
from ejkernel.kernels._triton._gluon import HAS_GLUON
from ejkernel.kernels._triton.linear._call import Call, heads, shape
from ejkernel.kernels._triton.linear._chunks import MULTIPROCESSORS, Array
from ejkernel.kernels._triton.linear._plan import gate_parts, tile
from ejkernel.kernels._triton.linear.kernels import gated_axis, other_axis, weak_chunks
from ejkernel.kernels._triton.linear.routes.route import Gradients
from ejkernel.kernels._triton.linear.routes.rows import GatedRows, GateRange

if HAS_GLUON:
    from ejkernel.kernels._triton.linear.kernels import weak_axis_from_rows, weak_axis_warpgroups

Outputs = dict[str, jax.ShapeDtypeStruct | None]  # dx, dy, dg
GATES_BY_WARPGROUPS = (frozenset({"gk"}), frozenset({"gk", "gv"}))
# (K, V): slots of keys, values and scores that fit into Hopper's shared memory. With 64 key channels two warpgroups take turns.
# There all numbers are even, so that a slot is always of the same warpgroup.
SLOTS = {
    (128, 128): (2, 1, 1), (128, 64): (2, 2, 1), (64, 128): (2, 2, 2), (64, 64): (4, 2, 2),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Axis:
    """The key or the value channels of a call."""

    of_keys: bool
    x: Array | None
    y: Array
    gate: Array | None
    scale: float  # of its scores
    with_head_gates: bool  # the head's own decay is added to this gate
    stride: int  # of its channel in a state [K, V]

    def block(self, call: Call) -> int | None:
        """The tile of its channels that the configuration names."""
        return call.plan.block_k if self.of_keys else call.plan.block_d


def axes(call: Call, do: Array | None) -> tuple[Axis, Axis]:
    """(key channels, value channels)."""
    q, k, v = call.query_key_value
    gk, gv = call.get("gk"), call.get("gv")
    return Axis(True, q, k, gk, call.plan.scale, True, v.shape[3]), Axis(False, do, v, gv, 1.0, gk is None, 1)


def output_alone(call: Call) -> Outputs:
    """What a forward pass asks of the value channels."""
    B, T, H, _, V = call.dims
    return {"dx": shape((B, T, H, V), call.plan.output), "dy": None, "dg": None}


def gradients_of_axes(call: Call) -> tuple[Outputs, Outputs]:
    """What a backward pass asks of the key and of the value channels, per query head.

    The gate that the head's own decay is added to has its gradient in float32: that of the head is its sum.
    """
    B, T, H, K, V = call.dims
    q, k, v = call.query_key_value
    gk, gv = call.get("gk"), call.get("gv")
    summed = {"gk": _by_head(call) and gk is not None, "gv": _by_head(call) and gk is None}

    def gate(name: str, x: Array | None, channels: int) -> jax.ShapeDtypeStruct | None:
        return None if x is None else shape((B, T, H, channels), np.float32 if summed[name] else call.per_head_dtype(x))

    keys: Outputs = {"dx": shape(q.shape, q.dtype), "dy": shape((B, T, H, K), call.per_head_dtype(k)), "dg": gate("gk", gk, K)}
    values: Outputs = {"dx": None, "dy": shape((B, T, H, V), call.per_head_dtype(v)), "dg": gate("gv", gv, V)}
    return keys, values


def _by_head(call: Call) -> bool:
    return "g" in call.arrays or "g_gamma" in call.arrays


def gradients(call: Call, keys: dict[str, Array], values: dict[str, Array], dinitial: Array) -> Gradients:
    """All gradients from those of both axes."""
    log_decay = None
    if _by_head(call):
        log_decay = jnp.sum(keys["dg"] if call.get("gk") is not None else values["dg"], -1)
    return Gradients(keys["dx"], keys["dy"], values["dy"], dinitial, log_decay, keys.get("dg"), values.get("dg"))


@dataclasses.dataclass(frozen=True)
class AxisLaunch:
    """`weak_axis` and `gated_axis`: a gated axis in bfloat16, chunks of 64 rows; without ends it is a forward pass.

    Attributes:
        own, other: the axis to compute, and the other one.
        gates: of the own gate.
        other_rows: of the other axis where it has a gate, else None.
        blocked: the other axis' scores in block order: M and within_blocks of `gated_axis`.
        starts, ends: state before and adjoint after each chunk.
        out: what to compute.
    """

    call: Call
    own: Axis
    other: Axis
    gates: GateRange
    other_rows: GatedRows | None
    blocked: dict[str, Array]
    starts: Array
    ends: Array | None
    out: Outputs

    def everywhere(self) -> dict[str, Array]:
        """dx, dy, dg: first in the weakly gated chunks, then in the others."""
        if not self._covered_by_warpgroups:
            return self.elsewhere(self._weak())
        return self.elsewhere(self._weak_by_warpgroups() if self.other_rows is None else self._weak_from_rows_by_warpgroups())

    @property
    def _covered_by_warpgroups(self) -> bool:
        """Whether a kernel by warpgroups computes this: gradients on Hopper of gates per channel alone, all in bfloat16, and no
        configuration names other tiles."""
        call, own, other = self.call, self.own, self.other
        plan = call.plan
        covered = plan.warpgroups and plan.gates in GATES_BY_WARPGROUPS and not (plan.named_scan_tiles or plan.block_k)
        asked = self.out["dy"] is not None and self.out["dg"] is not None and (plan.K, plan.V) in SLOTS
        arrays = (own.x, own.y, own.gate, other.x, other.y)
        return covered and asked and all(x is not None and x.dtype == jnp.bfloat16 for x in arrays)

    def _weak_by_warpgroups(self) -> dict[str, Array]:
        call, own, other = self.call, self.own, self.other
        plan, chunks, H = call.plan, call.chunks, call.dims[2]
        count = chunks.count * H
        keys, values, scores = SLOTS[plan.K, plan.V]
        return triton_call(
            arguments={
                "q": own.x, "k": own.y, "g": own.gate, "do": other.x, "v": other.y, "starts": self.starts, "ends": self.ends,
                "weak": self.gates.weak, "scale": own.scale, "COUNT": count, **chunks.arguments,
            },
            out_shape=self.out, kernel=weak_axis_warpgroups.weak_axis_by_warpgroups, grid=(min(MULTIPROCESSORS, count),), H=H,
            HQ=heads(own.x), HK=heads(own.y), HG=heads(own.gate), HV=heads(other.y), K=plan.K, V=plan.V, C=plan.C,
            SIGN=plan.sign, EVEN=chunks.even, KEYS=keys, VALUES=values, SCORES=scores, COPY_REGISTERS=40, SCORE_REGISTERS=72,
            GRADIENT_REGISTERS=200,
        )  # fmt: skip

    def _weak_from_rows_by_warpgroups(self) -> dict[str, Array]:
        call, own, rows = self.call, self.own, self.other_rows
        assert rows is not None
        plan, chunks, H = call.plan, call.chunks, call.dims[2]
        count = chunks.count * H
        return triton_call(
            arguments={
                "x": own.x, "y": own.y, "g": own.gate, "x2": rows.xd, "y2": rows.yd, "A2": rows.scores,
                "A2_low": rows.scores_low, "chunk_decay2": rows.chunk_decay, "starts": self.starts, "ends": self.ends,
                "weak": self.gates.weak, "scale": own.scale, "COUNT": count, **chunks.arguments,
            },
            out_shape=self.out, kernel=weak_axis_from_rows.weak_axis_from_rows_by_warpgroups,
            grid=(min(MULTIPROCESSORS, count),), H=H, HX=heads(own.x), HY=heads(own.y), HG=heads(own.gate),
            D=own.y.shape[3], D2=self.other.y.shape[3], C=plan.C, SIGN=plan.sign, EVEN=chunks.even, TURNED=not own.of_keys,
            COPY_REGISTERS=40, PASSED_REGISTERS=72, GRADIENT_REGISTERS=200,
        )  # fmt: skip

    def _weak(self) -> dict[str, Array]:
        common, plan = self._common(), self.call.plan
        BD = self.own.block(self.call) or tile(common["D"], 64)
        rows, chunks = self.other_rows, self.call.chunks
        scores = {"A2": None, "A2_low": None} if rows is None else {"A2": rows.scores, "A2_low": rows.scores_low}
        inputs = self._arguments()
        return triton_call(
            arguments={**inputs, **scores}, out_shape=self.out, kernel=weak_chunks.weak_axis,
            grid=(cdiv(common["D"], BD) * chunks.count * common["H"],), BD=BD, B2=tile(common["D2"], 128), num_warps=4,
            GATE_PARTS=gate_parts(plan, *(inputs[name] for name in ("g", "gs", "gamma"))), STAGES=1 if rows is None else 2,
            **common,
        )  # fmt: skip

    def elsewhere(self, filled: dict[str, Array]) -> dict[str, Array]:
        """dx, dy, dg in the chunks that are not weakly gated; filled: with the others already in them."""
        common, chunks = self._common(), self.call.chunks
        H, D, D2 = common["H"], common["D"], common["D2"]
        BD = self.own.block(self.call) or 32
        group = chunks.together(H * cdiv(D, BD))
        split = common["SPLIT"] == 2
        memory = {f"filled_{name}": filled.get(name) for name in self.out}
        arguments = {
            **self._arguments(), **self.blocked, "block_decays": self.gates.block_decays, "COUNT": chunks.count, **memory,
        }  # fmt: skip
        return triton_call(
            arguments=arguments, out_shape=self.out, kernel=gated_axis.gated_axis,
            grid=(cdiv(D, BD) * cdiv(chunks.count, group) * H,), BD=BD, B2=tile(D2, 128), GROUP=group,
            STAGES=1 if D2 <= 128 else 2, STATES_FIRST=D2 > 128 or split, num_warps=8,
            maxnreg=None if split else 128,  # split 4.9 ms instead of 6.0, and 7.5 with the states last
            input_output_aliases={f"filled_{name}": name for name in filled}, **common,
        )  # fmt: skip

    def _arguments(self) -> dict[str, Any]:
        """What both kernels read."""
        call, own, other, rows = self.call, self.own, self.other, self.other_rows
        x2, y2 = (other.x, other.y) if rows is None else (rows.xd, rows.yd)
        return {
            "x": own.x if self.out["dy"] is not None else None, "y": own.y, "g": own.gate,
            "gs": call.get("g") if own.of_keys else None, "gamma": call.get("g_gamma") if own.of_keys else None,
            "x2": x2, "y2": None if self.ends is None else y2, "chunk_decay2": None if rows is None else rows.chunk_decay,
            "starts": self.starts, "ends": self.ends, "weak": self.gates.weak,
            "scale": own.scale,  # the key channels' x is scaled by `rows_of_axis`
            **call.chunks.arguments,
        }  # fmt: skip

    def _common(self) -> dict[str, Any]:
        """What both kernels are compiled for."""
        call, own, other, rows = self.call, self.own, self.other, self.other_rows
        plan, H = call.plan, call.dims[2]
        return {
            "H": H, "HX": heads(own.x) if own.of_keys else H, "HY": heads(own.y), "HG": heads(own.gate),
            "HGS": heads(call.get("g") if own.of_keys else None),
            "HX2": H, "HY2": heads(other.y), "D": own.y.shape[3], "D2": other.y.shape[3],
            "P2": 0 if rows is None else rows.chunk_decay.shape[2], "STRIDE": own.stride, "STRIDE2": other.stride,
            "SIGN": plan.sign, "EVEN": call.chunks.even, "PREC": plan.precision, "SPLIT": 1 if rows is None else 2,
            "num_stages": 1, "shrink_stages": True,
        }  # fmt: skip


def blocked_shapes(call: Call, split: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Of scores in block order, as `gated_axis` reads those of the other axis."""
    n, H = call.chunks.count, call.dims[2]
    return {"M": shape((n, H, split, 64, 64), call.plan.operand), "within_blocks": shape((n, H, 8, 8, 8), np.float32)}


def scores_in_blocks(call: Call, x: Array, y: Array, weak: Array, scale: float) -> dict[str, Array]:
    """scale * x y^T of value channels without a gate, in those chunks that are not weakly gated."""
    H, D, chunks = call.dims[2], y.shape[3], call.chunks
    return triton_call(
        arguments={"x": x, "y": y, "weak": weak, "scale": scale, **chunks.arguments},
        out_shape=blocked_shapes(call, 1), kernel=other_axis.scores_in_blocks, grid=(chunks.count * H,), H=H, HX=heads(x),
        HY=heads(y), D=D, BD=tile(D, 128), SIGN=call.plan.sign, EVEN=chunks.even, PREC=call.plan.precision,
        num_warps=4, num_stages=1,
    )  # fmt: skip
