"""One call as its kernels see it: arrays, their cut into chunks, and what launches have in common."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import triton.language as tl

from ejkernel.callib import cdiv, triton_call
from ejkernel.kernels._triton.linear._chunks import Array, Chunks, Segments
from ejkernel.kernels._triton.linear._plan import Plan, gate_parts
from ejkernel.kernels._triton.linear.kernels.head_decays import running_log_decays

OPERANDS = {"bfloat16": tl.bfloat16, "float32": tl.float32}
HEADS_TOGETHER = 16  # of `running_log_decays`


def shape(dims: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, dtype)


def heads(x: Array | None) -> int:
    """Heads of an array [B, T, heads, ...]; 1 when it is not given (any number that divides will do)."""
    return 1 if x is None else x.shape[2]


@dataclasses.dataclass(frozen=True)
class Call:
    """One call's arrays and their cut into chunks.

    Attributes:
        arrays: those of query, key, value, g, g_gamma, gk, gv, initial_state that are given.
        log_decays: of `running_log_decays`, where a forward pass has made them already.
    """

    plan: Plan
    arrays: dict[str, Array]
    cu_seqlens: Array | None
    chunks: Chunks
    log_decays: Array | None = None

    @classmethod
    def of(cls, plan: Plan, arrays: dict[str, Array], cu_seqlens: Array | None, log_decays: Array | None = None) -> Call:
        B, T = arrays["query"].shape[:2]
        return cls(plan, arrays, cu_seqlens, Chunks.of(plan, B, T, cu_seqlens), log_decays)

    def get(self, name: str) -> Array | None:
        return self.arrays.get(name)

    @property
    def query_key_value(self) -> tuple[Array, Array, Array]:
        return self.arrays["query"], self.arrays["key"], self.arrays["value"]

    @property
    def dims(self) -> tuple[int, int, int, int, int]:
        """(B, T, H, K, V); H: the heads that have states, those of query, or of value in the delta rule."""
        B, T, query_heads, K = self.arrays["query"].shape
        value_heads, V = self.arrays["value"].shape[2:]
        return B, T, max(query_heads, value_heads), K, V

    @property
    def sequences(self) -> int:
        return self.dims[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1

    @functools.cached_property
    def head_gates(self) -> dict[str, Array | None]:
        """g and g_gamma as kernels take them, or, where `head_decays` reads them, the running sums of both for g."""
        g, g_gamma = self.get("g"), self.get("g_gamma")
        if g is None or self.plan.exact or not self.plan.per_head:
            return {"gs": g, "gamma": g_gamma}
        if self.log_decays is not None:
            return {"gs": self.log_decays, "gamma": None}
        H, plan = self.dims[2], self.plan
        made = triton_call(
            arguments={"gs": g, "gamma": g_gamma, **self.chunks.arguments},
            out_shape={"running": shape((self.chunks.count, H, plan.C), np.float32)},
            kernel=running_log_decays, grid=(cdiv(H, HEADS_TOGETHER) * self.chunks.count,), num_warps=4,
            H=H, HGS=heads(g), C=plan.C, BH=HEADS_TOGETHER, SIGN=plan.sign,
        )  # fmt: skip
        return {"gs": made["running"], "gamma": None}

    @property
    def kept_log_decays(self) -> dict[str, Array]:
        """The running sums, if any, for the backward pass."""
        gs = self.head_gates["gs"]
        return {} if gs is None or gs is self.get("g") else {"log_decays": gs}

    @property
    def gate_parts(self) -> int:
        """bfloat16 parts that hold a log decay of this call."""
        return gate_parts(self.plan, *(self.get(name) for name in ("gk", "gv", "g", "g_gamma")))

    def segments(self, tiles: int) -> Segments:
        """The segments of a scan whose state is cut into so many tiles."""
        return Segments.of(self.chunks, self.sequences, self.sequences * self.dims[2] * tiles)

    def constants(self) -> dict[str, Any]:
        """What every kernel of chunks of any length is compiled for."""
        plan = self.plan
        return {
            "H": self.dims[2], "HGS": heads(self.get("g")), "C": plan.C, "SIGN": plan.sign, "EVEN": self.chunks.even,
            "DT": OPERANDS[plan.operand.name], "PREC": plan.precision,
        }  # fmt: skip

    @property
    def shrinks_stages(self) -> bool:
        """Whether loads in flight may be fewer than asked for: a configuration's own number is used as given."""
        return self.plan.num_stages is None

    def per_head_dtype(self, x: Array) -> Any:
        """What a kernel writes a gradient per head in: the array's own dtype, or float32 when a group is summed after."""
        return x.dtype if heads(x) == self.dims[2] else np.float32


def states_in_chunks(call: Call) -> int:
    """Bytes of one state for every chunk and head, in the dtype of operands."""
    _, _, H, K, V = call.dims
    return call.chunks.count * H * K * V * call.plan.operand.itemsize
