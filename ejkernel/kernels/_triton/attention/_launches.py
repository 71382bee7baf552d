"""The launches of a call: forward, and the gradient of every array."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.callib import cdiv, triton_call
from ejkernel.kernels._triton.attention._masks import Masks
from ejkernel.kernels._triton.attention._plan import Plan, Tiles
from ejkernel.kernels._triton.attention.kernels.backward import (
    flash_bias_gradient,
    flash_key_gradient,
    flash_query_gradient,
    row_products,
)
from ejkernel.kernels._triton.attention.kernels.call import Call
from ejkernel.kernels._triton.attention.kernels.forward import combine_parts, flash_forward

Array = jax.Array
Arrays = dict[str, Any]  # query, key, value and, where given, bias, sinks, traced_scale
Others = dict[str, Any]  # mask, segment ids, positions, dropout_words, where given
LOG2E = 1.4426950408889634
COMBINED_ROWS = 4  # of a program of `combine_parts`
PRODUCT_ROWS = 64


def forward(plan: Plan, arrays: Arrays, others: Others) -> tuple[Array, Array]:
    """(output [B, T, H, DV], lse [B, H, T] in the base of the logits: 2, of exact calls e)."""
    B, T, H, _ = arrays["query"].shape
    _, _, HK, DV = arrays["value"].shape
    tiles, parts = plan.forward, plan.parts
    masks = Masks.of(plan, arrays, others, of_keys=False)
    groups = (HK, H // HK) if plan.grouped else None
    rows = max(tiles.block_q, T) if plan.grouped else tiles.block_q
    table = masks.ranges((rows, tiles.block_k), groups=groups)
    leading = (parts,) if parts > 1 else ()
    programs = cdiv(T * H // HK, tiles.block_q) * parts * HK if plan.grouped else cdiv(T, tiles.block_q) * H
    found = triton_call(
        arguments={
            **_operands(plan, arrays, others, masks), "sinks": arrays.get("sinks"), "ranges": table, "ROWS": B * H * T,
            "PARTS": parts,
        },
        out_shape={
            "o": _shape((*leading, B, T, H, DV), np.float32 if leading else arrays["query"].dtype),
            "lse": _shape((*leading, B, H, T), np.float32),
        },
        kernel=flash_forward, grid=programs * B, **_compiled(tiles, not plan.named_stages), CALL=masks.call,
        **_of_table(table), GROUPED=plan.grouped, PARTIAL=parts > 1,
    )  # fmt: skip
    if parts == 1:
        return found["o"], found["lse"]
    joined = triton_call(
        arguments={"part_o": found["o"], "part_lse": found["lse"], "T": T, "ROWS": B * H * T, "PARTS": parts},
        out_shape={"o": _shape((B, T, H, DV), arrays["query"].dtype), "lse": _shape((B, H, T), np.float32)},
        kernel=combine_parts, grid=cdiv(B * H * T, COMBINED_ROWS), num_warps=4,
        H=H, DV=DV, BDV=masks.call.BDV, R=COMBINED_ROWS, EXACT=plan.exact,
    )  # fmt: skip
    return joined["o"], joined["lse"]


def backward(
    plan: Plan, arrays: Arrays, others: Others, output: Array, lse: Array, d_output: Array, *, bias: bool = True
) -> Arrays:
    """Gradients of query, key, value and, where `bias` says that it is wanted, bias, in their own dtypes. And delta [B, H, T],
    the rows' products of output and adjoint, and dscale [B, H, T] where the scale has a gradient: what `shared_gradients`
    sums."""
    B, T, H, _ = arrays["query"].shape
    _, S, HK, DV = arrays["value"].shape
    masks = Masks.of(plan, arrays, others, of_keys=True)
    call = masks.call
    made = triton_call(
        arguments={"o": output, "do": d_output, "T": T}, out_shape={"delta": _shape((B, H, T), np.float32)},
        kernel=row_products, grid=cdiv(T, PRODUCT_ROWS) * H * B, H=H, DV=DV, BDV=call.BDV, BM=PRODUCT_ROWS,
    )  # fmt: skip
    given = {**_operands(plan, arrays, others, masks), "do": d_output, "lse": lse, "delta": made["delta"]}
    tiles = plan.kernels.query
    table = masks.ranges(tiles[:2])
    of_query = triton_call(
        arguments={**given, "ranges": table},
        out_shape={
            "dq": _like(arrays["query"]),
            "dscale": _shape((B, H, T), np.float32) if "traced_scale" in arrays else None,
        },
        kernel=flash_query_gradient, grid=cdiv(T, tiles.block_q) * H * B, CALL=call, **_compiled(tiles), **_of_table(table),
    )  # fmt: skip
    tiles = plan.kernels.key
    table = masks.ranges(tiles[:2], of_keys=True)
    of_key = triton_call(
        arguments={**given, "mask_of_keys": masks.bits_of_keys, "ranges": table},
        out_shape={"dk": _like(arrays["key"]), "dv": _like(arrays["value"])},
        kernel=flash_key_gradient, grid=cdiv(S, tiles.block_k) * HK * B, **_compiled(tiles), CALL=call, **_of_table(table),
    )  # fmt: skip
    found = {"query": of_query["dq"], "key": of_key["dk"], "value": of_key["dv"], "delta": made["delta"]}
    if "bias" in arrays and bias:
        found["bias"] = _bias_gradient(plan, arrays, given, call)
    if "traced_scale" in arrays:
        found["dscale"] = of_query["dscale"]
    return found


def shared_gradients(plan: Plan, arrays: Arrays, lse: Array, found: Arrays) -> Arrays:
    """The gradients of what all rows of the batch have in common, from what `backward` gave: sinks and the scale."""
    grads = {}
    if "sinks" in arrays:
        sinks = arrays["sinks"]
        logit = sinks.astype(np.float32)[None, :, None]
        share = jnp.exp(logit - lse) if plan.exact else jnp.exp2(logit * np.float32(LOG2E) - lse)  # [B, H, T]
        grads["sinks"] = -(share * found["delta"]).sum((0, 2)).astype(sinks.dtype)
    if "traced_scale" in arrays:
        grads["traced_scale"] = found["dscale"].sum().astype(arrays["traced_scale"].dtype)
    return grads


def _bias_gradient(plan: Plan, arrays: Arrays, given: dict[str, Any], call: Call) -> Array:
    bias, tiles = arrays["bias"], plan.kernels.bias
    b, h, t, s = bias.shape
    programs = cdiv(t, tiles.block_q) * cdiv(s, tiles.block_k) * h * b
    found = triton_call(
        arguments={**given, "B": arrays["query"].shape[0]}, out_shape={"dbias": _like(bias)}, kernel=flash_bias_gradient,
        grid=programs, **_compiled(tiles), CALL=call,
    )  # fmt: skip
    return found["dbias"]


def _operands(plan: Plan, arrays: Arrays, others: Others, masks: Masks) -> dict[str, Any]:
    """What every kernel reads."""
    return {
        **masks.operands, "q": arrays["query"], "k": arrays["key"], "v": arrays["value"], "bias": arrays.get("bias"),
        "words": others.get("dropout_words"), "traced_scale": arrays.get("traced_scale"), "scale": float(plan.scale),
        "cap": float(plan.soft_cap or 0.0), "T": arrays["query"].shape[1], "S": arrays["key"].shape[1],
    }  # fmt: skip


def _compiled(tiles: Tiles, shrink: bool = True) -> dict[str, Any]:
    return {
        "BM": tiles.block_q, "BN": tiles.block_k, "STAGES": tiles.num_stages, "num_warps": tiles.num_warps,
        "num_stages": tiles.num_stages, "shrink_stages": shrink,
    }  # fmt: skip


def _of_table(table: Array | None) -> dict[str, Any]:
    batch, heads = (1, 1) if table is None else table.shape[:2]
    return {"RANGES_B": int(batch > 1), "RANGES_H": heads}


def _shape(shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _like(x: Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)
