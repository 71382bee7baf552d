"""The record of softmax attention: what verifies, measures and tunes it, and whom it is measured against."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from ejkernel.modules import Attention, attention
from ejkernel.testing.attention_cases import CASES, AttentionCase
from ejkernel.testing.attention_reference import attention_reference
from ejkernel.testing.contenders import Contender, jitted
from ejkernel.testing.judge import Judge, Part, float64
from ejkernel.testing.record import HeadsRecord
from ejkernel.testing.shapes import Shape


def _jax_nn(record: AttentionRecord) -> Contender:
    """What JAX itself has."""
    return jitted(functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="xla"))


def _cudnn(record: AttentionRecord) -> Contender:
    """cuDNN's fused kernel, called directly."""
    run = functools.partial(jax.nn.dot_product_attention, is_causal=True, implementation="cudnn")
    return jitted(run, absent=record.unavailable(["cuda"]).get("cuda"))


RIVALS: dict[str, Callable[[Any], Contender]] = {"jax.nn": _jax_nn, "cudnn": _cudnn}


class AttentionRecord(HeadsRecord):
    """Softmax attention, measured with a causal mask."""

    def usual_shapes(self, backend: str) -> Sequence[str]:
        if backend == "cpu":
            return [f"1x{T}x8x64x64" for T in (512, 1024, 2048, 4096)]
        return [f"8x{T}x16x128x128" for T in (1024, 2048, 4096, 8192)]

    def operations(self, shape: Shape, direction: str) -> int:
        """Those of the pairs that a causal mask keeps: half of 2 T^2 (K + V) forward, 2.5 times that more backward."""
        rows = shape.batch * shape.heads * shape.time
        forward = rows * shape.time * (shape.key_channels + shape.value_channels)
        return forward if direction == "forward" else forward * 7 // 2

    def cases(self) -> Sequence[AttentionCase]:
        return CASES

    def judge(self, shape: Shape, arrays: Mapping[str, jax.Array], cotangent: jax.Array, gradients: bool) -> Judge:
        """The last queries of a few heads, over all keys."""
        part = Part.of(shape)
        wide, shown = {name: float64(x) for name, x in arrays.items()}, part.only(cotangent)
        found = attention_reference(
            part.cut("query", wide["query"]),
            part.heads_of("key", wide["key"]),
            part.heads_of("value", wide["value"]),
            part.cut("output", float64(shown)),
            causal=True,
            q_positions=np.arange(shape.time - part.tokens, shape.time)[None],
            kv_positions=np.arange(shape.time)[None],
        )
        of_keys = lambda name, array: (part.heads_of if name in ("key", "value") else part.cut)(name, array)
        return Judge(shown, found.output, found.gradients if gradients else {}, of_keys)


RECORDS = (
    AttentionRecord(
        operation=attention, kernel=Attention, options={"causal": True, "dtype": None, "return_weights": False}, rivals=RIVALS
    ),
)
