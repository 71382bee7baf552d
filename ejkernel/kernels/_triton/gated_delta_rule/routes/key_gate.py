"""The delta rule with a gate per key channel: bfloat16 in chunks of 64 rows, and everything else."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from ejkernel.callib import cdiv, triton_call
from ejkernel.kernels._triton.gated_delta_rule.kernels import decayed_rows, gated_gradients, weak_gradients
from ejkernel.kernels._triton.gated_delta_rule.routes.launches import Rows, ScannedBack, correction_of, scan, scan_back
from ejkernel.kernels._triton.linear._call import Call, heads, shape
from ejkernel.kernels._triton.linear._chunks import Array
from ejkernel.kernels._triton.linear._plan import Plan, gate_parts, tile
from ejkernel.kernels._triton.linear.routes.axis import Axis, Outputs
from ejkernel.kernels._triton.linear.routes.general import one_axis, scores_of_axis
from ejkernel.kernels._triton.linear.routes.route import Changes, Gradients, Route, Saved
from ejkernel.kernels._triton.linear.routes.rows import GateRange, padded, rows_of_axis

CHANGES: Changes = (
    {"block_d": 32}, {"block_d": 64}, {"num_warps": 8}, {"num_stages": 1}, {"block_d": 32, "num_warps": 2},
)  # fmt: skip


def _written(call: Call, errors: Array) -> Array:
    """U [B, T, H, V]: what each row writes, beta times its error."""
    return (errors.astype(jnp.float32) * call.arrays["beta"].astype(jnp.float32)[..., None]).astype(errors.dtype)


def _axes(call: Call, do: Array, dv: Array, written: Array) -> tuple[tuple[Axis, Axis], tuple[Axis, Axis]]:
    """(key channels, value channels) of the scores of queries with keys, and of keys with keys: each of them reads like q.

    written: U.
    """
    q, k, gk, V = call.arrays["query"], call.arrays["key"], call.arrays["gk"], call.dims[4]
    of_queries = Axis(True, q, k, gk, call.plan.scale, False, V), Axis(False, do, written, None, 1.0, False, 1)
    of_keys = Axis(True, k, k, gk, -1.0, False, V), Axis(False, dv, written, None, 1.0, False, 1)
    return of_queries, of_keys


@dataclasses.dataclass(frozen=True)
class DeltaKeyGate(Route):
    """Gated rows and intra-chunk scores, of queries and of keys, are made chunk by chunk, then the correction. A scan of them
    makes the outputs and, back in time, dv and dbeta. The gradient of the key channels is then made chunk by chunk."""

    title = "delta rule, key gate"
    covers = "g [B, T, H, K], bfloat16, chunks of 64"

    @classmethod
    def covering(cls, plan: Plan) -> Route | None:
        return cls(plan) if "gk" in plan.gates and plan.bfloat16 and plan.C == 64 else None

    def forward(self, call: Call, keep: bool) -> tuple[Array, Array, Saved]:
        q, k, _ = call.query_key_value
        made = rows_of_axis(
            call, q, k, call.arrays["gk"], call.plan.scale, g=None, g_gamma=None, block_decays=keep, of_keys=True
        )
        assert made.keys is not None
        assert made.xd is not None
        assert made.scores is not None
        correction = correction_of(call, made.keys.scores, made.keys.scores_low)
        rows = Rows(made.xd, made.keys.yd, made.scores, made.yd, made.chunk_decay)
        found = scan(call, rows, correction, keep)
        saved = {**found.kept(correction), "rows": rows, "gates": made.gates} if keep else {}
        return found.output, found.final, saved

    def backward(self, call: Call, saved: Saved, do: Array, dfinal: Array | None) -> Gradients:
        back = scan_back(call, saved["rows"], saved, do, dfinal)
        filled = self._weak(call, do, saved, back)
        found = self._elsewhere(call, do, saved, back, filled)
        return Gradients(found["dq"], found["dk"], back.value, back.initial_state, gk=found["dg"], beta=back.beta)

    def _weak(self, call: Call, do: Array, saved: Saved, back: ScannedBack) -> dict[str, Array]:
        """dq, dk, dg in the weakly gated chunks."""
        plan, (B, T, H, K, V), chunks = call.plan, call.dims, call.chunks
        q, k, gk = call.arrays["query"], call.arrays["key"], call.arrays["gk"]
        common = {
            "beta": call.arrays["beta"], "do": do, "dv": back.value, "errors": saved["errors"], "weak": saved["gates"].weak,
            "scale": plan.scale, **chunks.arguments,
        }  # fmt: skip
        constants: dict[str, Any] = {"H": H, "V": V, "SIGN": plan.sign, "EVEN": chunks.even, "PREC": plan.precision}
        matrix = shape((chunks.count, H, 64, 64), plan.operand)
        scores = triton_call(
            arguments=common, out_shape={"dN": matrix, "dM": matrix}, kernel=weak_gradients.delta_score_adjoints,
            grid=(chunks.count * H,), BV=tile(V, 128), num_warps=4, num_stages=1, **constants,
        )  # fmt: skip
        BK = tile(K, 32)
        out = {
            "dq": shape((B, T, H, K), call.per_head_dtype(q)), "dk": shape((B, T, H, K), call.per_head_dtype(k)),
            "dg": shape((B, T, H, K), gk.dtype),
        }  # fmt: skip
        return triton_call(
            arguments={**common, **scores, "q": q, "k": k, "g": gk, "starts": saved["states"], "ends": back.ends},
            out_shape=out, kernel=weak_gradients.delta_weak_gradients, grid=(cdiv(K, BK) * chunks.count * H,), HK=heads(k),
            K=K, BK=BK, BV=tile(V, 64), GATE_PARTS=gate_parts(plan, gk), num_warps=4, num_stages=1,
            maxnreg=168,  # three programs to a multiprocessor: 0.55 ms against 0.66 without, 0.75 with 128
            **constants,
        )  # fmt: skip

    def _elsewhere(self, call: Call, do: Array, saved: Saved, back: ScannedBack, filled: dict[str, Array]) -> dict[str, Array]:
        """dq, dk, dg in the chunks that are not weakly gated, in memory that is `filled` with the others."""
        plan, (_, _, H, K, V), chunks = call.plan, call.dims, call.chunks
        gates: GateRange = saved["gates"]
        common = {
            "do": do, "dv": back.value, "errors": saved["errors"], "betas": saved["correction"].betas, "weak": gates.weak,
            "scale": plan.scale, **chunks.arguments,
        }  # fmt: skip
        constants: dict[str, Any] = {"H": H, "V": V, "SIGN": plan.sign, "EVEN": chunks.even, "PREC": plan.precision}
        matrix = shape((chunks.count, H, 64, 64), plan.operand)
        scores = triton_call(
            arguments=common,
            out_shape={"dN": matrix, "dM": matrix, "within_blocks": shape((chunks.count, H, 8, 8, 8, 2), np.float32)},
            kernel=gated_gradients.delta_scores_in_blocks, grid=(chunks.count * H,), BV=tile(V, 128), num_warps=4,
            num_stages=1, maxnreg=255,  # named, as for the scans
            **constants,
        )  # fmt: skip
        q, k, gk = call.arrays["query"], call.arrays["key"], call.arrays["gk"]
        BK = plan.block_k or 32
        group = chunks.together(H * cdiv(K, BK))
        return triton_call(
            arguments={
                **common, **scores, "q": q, "k": k, "g": gk, "block_decays": gates.block_decays, "starts": saved["states"],
                "ends": back.ends, "COUNT": chunks.count, **{f"filled_{name}": x for name, x in filled.items()},
            },
            out_shape={name: shape(x.shape, x.dtype) for name, x in filled.items()},
            kernel=gated_gradients.delta_gated_gradients, grid=(cdiv(K, BK) * cdiv(chunks.count, group) * H,), HK=heads(k),
            K=K, BK=BK, BV=tile(V, 64), GROUP=group, num_warps=8, num_stages=1, maxnreg=128,
            STAGES=2,  # 0.93 ms on r1; all value channels in one turn, which are loaded to registers, and the states last 1.08
            shrink_stages=True, input_output_aliases={f"filled_{name}": name for name in filled}, **constants,
        )  # fmt: skip

    def changes(self) -> Changes:
        return CHANGES


@dataclasses.dataclass(frozen=True)
class DeltaGeneral(Route):
    """`DeltaKeyGate` by the kernels for any dtype and length of chunks."""

    title = "delta rule, general"
    covers = "every other call with g [B, T, H, K]: float32, float16, other chunks"

    @classmethod
    def covering(cls, plan: Plan) -> Route | None:
        return cls(plan)

    def forward(self, call: Call, keep: bool) -> tuple[Array, Array, Saved]:
        k, gk, V = call.arrays["key"], call.arrays["gk"], call.dims[4]
        of_keys = scores_of_axis(call, Axis(True, k, k, gk, 1.0, False, V))
        assert of_keys is not None
        correction = correction_of(call, of_keys)
        rows = self._rows(call)
        found = scan(call, rows, correction, keep)
        saved = {**found.kept(correction), "rows": rows} if keep else {}
        return found.output, found.final, saved

    def _rows(self, call: Call) -> Rows:
        plan, (_, _, H, K, V), chunks = call.plan, call.dims, call.chunks
        q, k, gk = call.arrays["query"], call.arrays["key"], call.arrays["gk"]
        P, BK = padded(K), min(padded(K), 32)
        rows = shape((chunks.count, H, plan.C, P), plan.operand)
        found = triton_call(
            arguments={"q": q, "k": k, "g": gk, "scale": plan.scale, **chunks.arguments},
            out_shape={"qd": rows, "kp": rows, "kd": rows, "chunk_decay": shape((chunks.count, H, P), np.float32)},
            kernel=decayed_rows.decayed_rows, grid=(cdiv(P, BK) * chunks.count * H,), H=H, HK=heads(k), K=K, KP=P, BK=BK,
            C=plan.C, SIGN=plan.sign, EVEN=chunks.even, GATE_PARTS=gate_parts(plan, gk), num_warps=4, num_stages=1,
        )  # fmt: skip
        scores = scores_of_axis(call, Axis(True, q, k, gk, plan.scale, False, V))
        assert scores is not None
        return Rows(found["qd"], found["kp"], scores, found["kd"], found["chunk_decay"])

    def backward(self, call: Call, saved: Saved, do: Array, dfinal: Array | None) -> Gradients:
        back = scan_back(call, saved["rows"], saved, do, dfinal)
        B, T, H, K, _ = call.dims
        rows = shape((B, T, H, K), np.float32)
        out: Outputs = {"dx": rows, "dy": rows, "dg": rows}
        (queries, values), (keys, values_of_keys) = _axes(call, do, back.value, _written(call, saved["errors"]))
        first = one_axis(call, queries, values, None, saved["states"], back.ends, out)
        second = one_axis(call, keys, values_of_keys, None, saved["states"], None, out, strict=True)
        dk, dg = first["dy"] + second["dx"] + second["dy"], first["dg"] + second["dg"]
        return Gradients(first["dx"], dk, back.value, back.initial_state, gk=dg, beta=back.beta)

    def changes(self) -> Changes:
        return CHANGES
