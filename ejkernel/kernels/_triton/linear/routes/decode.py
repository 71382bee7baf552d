"""A step, or a few: the recurrence token by token in one launch."""

from __future__ import annotations

import dataclasses

import numpy as np

from ejkernel.callib import cdiv, triton_call
from ejkernel.kernels._linear.config import RecurrenceConfig
from ejkernel.kernels._triton.linear._call import Call, heads, shape
from ejkernel.kernels._triton.linear._chunks import Array
from ejkernel.kernels._triton.linear._plan import tile
from ejkernel.kernels._triton.linear.kernels import decode_step
from ejkernel.kernels._triton.linear.routes.route import Changes, Gradients, Route, Saved

CHANGES: Changes = (
    {"block_d": 16}, {"block_d": 32}, {"block_d": 64}, {"num_warps": 2}, {"num_warps": 8}, {"block_d": 16, "num_warps": 1},
    {"block_d": 16, "num_warps": 2}, {"block_d": 64, "num_warps": 8},
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class DecodeStep(Route):
    """Every state is read and written once. The gradient is that of the call in chunks."""

    chunked: Route
    title = "decode step"
    covers = "schedule='recurrent', the heuristic up to 16 tokens; any gates and dtypes"

    @property
    def name(self) -> str:
        return f"{self.title} (gradient: {self.chunked.name})"

    def differentiated(self, *, constant_decay: bool) -> Route:
        return dataclasses.replace(self, chunked=self.chunked.differentiated(constant_decay=constant_decay))

    def forward(self, call: Call, keep: bool) -> tuple[Array, Array, Saved]:
        plan, (B, T, H, K, V) = call.plan, call.dims
        q, k, v = call.query_key_value
        begin, N = call.get("initial_state"), call.sequences
        BK = tile(K, 512)
        BV = plan.block_d or tile(V, max(16, 8192 // BK))
        gates = {"gs": call.get("g"), "gamma": call.get("g_gamma"), "gk": call.get("gk"), "gv": call.get("gv")}
        in_place = begin is not None and begin.dtype == np.float32
        found = triton_call(
            arguments={
                "q": q, "k": k, "v": v, **gates, "begin": begin, "cu_seqlens": call.cu_seqlens, "scale": plan.scale, "T": T,
            },
            out_shape={"o": shape((B, T, H, V), plan.output), "final": shape((N, H, K, V), np.float32)},
            kernel=decode_step.decode_steps, grid=(cdiv(V, BV) * N * H,), H=H, HK=heads(k), HGS=heads(gates["gs"]),
            HGK=heads(gates["gk"]), HGV=heads(gates["gv"]), K=K, V=V, BK=BK, BV=BV, SIGN=plan.sign,
            num_warps=plan.num_warps or 4, input_output_aliases={"begin": "final"} if in_place else None,
        )  # fmt: skip
        return found["o"], found["final"], {}

    def backward(self, call: Call, saved: Saved, do: Array, dfinal: Array | None) -> Gradients:
        return self.chunked.backward(call, self.chunked.recomputed(call), do, dfinal)

    def changes(self) -> Changes:
        return CHANGES

    def refuses(self, cfg: RecurrenceConfig) -> str | None:
        return self.chunked.refuses(cfg)
