"""A step, or a few: the recurrence token by token in one launch."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np

from ejkernel.callib import cdiv, triton_call
from ejkernel.kernels._linear.config import RecurrenceConfig
from ejkernel.kernels._triton.linear._call import Call, heads, shape
from ejkernel.kernels._triton.linear._chunks import Array
from ejkernel.kernels._triton.linear._plan import tile
from ejkernel.kernels._triton.linear.kernels import decode_step
from ejkernel.kernels._triton.linear.routes.route import Changes, Gradients, Route, Saved

VALUE_TILES, WARPS = (16, 32, 64, 128), (1, 2, 4, 8, 16)
A_THREADS = (16, 32, 64)  # numbers of the state that a thread may hold: fewer are too few loads in flight, more spill


@dataclasses.dataclass(frozen=True)
class DecodeStep(Route):
    """Every state is read and written once. The gradient is that of the call in chunks.

    Attributes:
        most_keys: key channels that one program may hold.
        state_tile, usual_warps: numbers of the state in a program, and its warps, where no configuration names them.
    """

    chunked: Route
    most_keys: ClassVar[int] = 512
    state_tile: ClassVar[int] = 8192
    usual_warps: ClassVar[int] = 4
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
        BK, BV, warps = self.tiles
        gates = {"gs": call.get("g"), "gamma": call.get("g_gamma"), "gk": call.get("gk"), "gv": call.get("gv")}
        in_place = begin is not None and begin.dtype == np.float32
        found = triton_call(
            arguments={
                "q": q, "k": k, "v": v, **gates, "begin": begin, "cu_seqlens": call.cu_seqlens, "scale": plan.scale, "T": T,
            },
            out_shape={"o": shape((B, T, H, V), plan.output), "final": shape((N, H, K, V), np.float32)},
            kernel=decode_step.decode_steps, grid=(cdiv(V, BV) * N * H,), H=H, HK=heads(k), HGS=heads(gates["gs"]),
            HGK=heads(gates["gk"]), HGV=heads(gates["gv"]), K=K, V=V, BK=BK, BV=BV, SIGN=plan.sign,
            num_warps=warps, input_output_aliases={"begin": "final"} if in_place else None,
        )  # fmt: skip
        return found["o"], found["final"], {}

    def backward(self, call: Call, saved: Saved, do: Array, dfinal: Array | None) -> Gradients:
        return self.chunked.backward(call, self.chunked.recomputed(call), do, dfinal)

    def changes(self) -> Changes:
        """Tiles in which a thread has enough of the state to load, and not too much to hold."""
        usual = dataclasses.replace(self, plan=dataclasses.replace(self.plan, block_d=None, num_warps=None)).tiles
        keys = usual[0]
        return tuple(
            {"block_d": values, "num_warps": warps}
            for values in VALUE_TILES
            for warps in WARPS
            if keys * values // (32 * warps) in A_THREADS and (keys, values, warps) != usual
        )

    @property
    def tiles(self) -> tuple[int, int, int]:
        """Key channels, value channels and warps of a program."""
        plan = self.plan
        keys = tile(plan.K, self.most_keys)
        return keys, plan.block_d or tile(plan.V, max(16, self.state_tile // keys)), plan.num_warps or self.usual_warps

    def refuses(self, cfg: RecurrenceConfig) -> str | None:
        return self.chunked.refuses(cfg)
