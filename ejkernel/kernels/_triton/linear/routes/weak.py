"""Launches of `weak_scan`: the forward pass of weakly gated sequences, where no gradient is to come."""

from __future__ import annotations

from typing import Any

import numpy as np

from ejkernel.callib import cdiv, triton_call
from ejkernel.kernels._triton.linear._call import Call, heads, shape
from ejkernel.kernels._triton.linear._plan import Plan, gate_parts, tile
from ejkernel.kernels._triton.linear.kernels import weak_scan
from ejkernel.kernels._triton.linear.routes.rows import padded
from ejkernel.kernels._triton.linear.routes.scans import Ends, WeakSequences


def scans_weak(plan: Plan) -> bool:
    """Whether weakly gated sequences are scanned apart: all key channels in one program, with tiles that nobody names."""
    return plan.scan_weak and padded(plan.K) <= 128 and not plan.named_scan_tiles


def scan_weak_sequences(call: Call) -> WeakSequences:
    """Outputs and final states of sequences all of whose chunks are weakly gated, head by head, if `scans_weak`."""
    plan, (B, T, H, K, V), chunks = call.plan, call.dims, call.chunks
    q, k, v = call.query_key_value
    gate, g, g_gamma = call.arrays["gk"], call.get("g"), call.get("g_gamma")
    KP, BV = padded(K), tile(V, 64)
    gates = {"g": gate, "gs": g, "gamma": g_gamma}
    common: dict[str, Any] = {
        "H": H, "HG": heads(gate), "HGS": heads(g), "K": K, "KP": KP, "SIGN": plan.sign, "EVEN": chunks.even,
    }  # fmt: skip
    found = triton_call(
        arguments={**gates, **chunks.arguments}, kernel=weak_scan.find_strong_sequences, grid=(chunks.count * H,),
        out_shape={"middle": shape((chunks.count, H, KP), np.float32), "strong": shape((call.sequences, H), np.int32)},
        zeroed_outputs=("strong",), LIMIT=plan.weak_limit, num_warps=4, num_stages=1, **common,
    )  # fmt: skip
    segments = call.segments(cdiv(V, BV))
    arguments = {"k": k, "v": v, **gates, **found, "scale": plan.scale, **chunks.arguments, **segments.arguments}
    common |= {
        "kernel": weak_scan.weak_scan, "HQ": heads(q), "HK": heads(k), "HV": heads(v), "BK": min(KP, 64), "V": V,
        "GATE_PARTS": gate_parts(plan, gate, g, g_gamma), "SCORE_PARTS": plan.score_parts, "STAGES": 2, "num_warps": 4,
        "shrink_stages": True,
    }  # fmt: skip
    ends = Ends()
    if segments.split:
        G = segments.count
        out = {"o": None, "final": shape((G, H, K, V), np.float32), "segment_decay": shape((G, H, K), np.float32)}
        nothing = dict.fromkeys(("q", "begin", "ends", "end_decay"))
        wide = tile(V, 128)  # without outputs there is room for it, and keys are decayed half as often
        made = triton_call(arguments={**arguments, **nothing}, out_shape=out, grid=(cdiv(V, wide) * G * H,), BV=wide, **common)
        ends = Ends(made["final"], made["segment_decay"])
    arguments |= {"q": q, "begin": call.get("initial_state"), "ends": ends.states, "end_decay": ends.key_decays}
    out = {
        "o": shape((B, T, H, V), plan.output), "final": shape((call.sequences, H, K, V), np.float32), "segment_decay": None,
    }  # fmt: skip
    made = triton_call(arguments=arguments, out_shape=out, grid=(cdiv(V, BV) * segments.count * H,), BV=BV, **common)
    return WeakSequences(found["strong"], ends, made["o"], made["final"])
