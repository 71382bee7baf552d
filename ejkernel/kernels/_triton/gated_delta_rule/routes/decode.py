"""A step of the delta rule, or a few: token by token in one launch."""

from __future__ import annotations

import dataclasses

import numpy as np

from ejkernel.callib import cdiv, triton_call
from ejkernel.kernels._triton.gated_delta_rule.kernels import decode_step
from ejkernel.kernels._triton.linear._call import Call, heads, shape
from ejkernel.kernels._triton.linear._chunks import Array
from ejkernel.kernels._triton.linear.routes.decode import DecodeStep
from ejkernel.kernels._triton.linear.routes.route import Saved


@dataclasses.dataclass(frozen=True)
class DeltaStep(DecodeStep):
    """Every state is read and written once. The gradient is that of the call in chunks.

    A step of 128 sequences with 16 heads of 128 x 128 takes 0.072 ms with 32 value channels and 2 warps, 0.075 with 64 and 4.
    """

    most_keys = 256
    state_tile = 4096
    usual_warps = 2
    title = "delta rule, decode step"
    covers = "schedule='recurrent', the heuristic up to 16 tokens; any gate and dtype"

    def forward(self, call: Call, keep: bool) -> tuple[Array, Array, Saved]:
        plan, (B, T, H, K, V) = call.plan, call.dims
        q, k, v = call.query_key_value
        begin, N = call.get("initial_state"), call.sequences
        BK, BV, warps = self.tiles
        in_place = begin is not None and begin.dtype == np.float32
        found = triton_call(
            arguments={
                "q": q, "k": k, "v": v, "beta": call.arrays["beta"], "gs": call.get("g"), "gk": call.get("gk"), "begin": begin,
                "cu_seqlens": call.cu_seqlens, "scale": plan.scale, "T": T,
            },
            out_shape={"o": shape((B, T, H, V), plan.output), "final": shape((N, H, K, V), np.float32)},
            kernel=decode_step.delta_steps, grid=(cdiv(V, BV) * N * H,), H=H, HK=heads(k), K=K, V=V, BK=BK, BV=BV,
            SIGN=plan.sign, num_warps=warps, input_output_aliases={"begin": "final"} if in_place else None,
        )  # fmt: skip
        return found["o"], found["final"], {}
