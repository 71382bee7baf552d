"""The record of the delta rule: what verifies, measures and tunes it, and whom it is measured against."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.modules import GatedDeltaRule, gated_delta_rule
from ejkernel.testing import flash_linear, jax_linear
from ejkernel.testing.contenders import Contender, jitted
from ejkernel.testing.delta_cases import CASES, DeltaCase
from ejkernel.testing.delta_reference import delta_reference
from ejkernel.testing.flash_delta import FlashDelta
from ejkernel.testing.hand_written import scan_delta_rule
from ejkernel.testing.judge import Judge, Part, of_recurrence
from ejkernel.testing.record import HeadsRecord
from ejkernel.testing.shapes import Shape

GROUPED = ("query", "key")  # what has fewer heads in a shape `H/Hk`


def _scan(record: DeltaRecord) -> Contender:
    """The `lax.scan` that people write by hand, with its autodiff."""
    return jitted(lambda **arrays: scan_delta_rule(**arrays)[0])


def _flash_delta(record: DeltaRecord) -> Contender:
    """flash-linear-attention, on torch copies of the arrays."""
    return flash_linear.contender(FlashDelta, dict)


def _jax_linear(record: DeltaRecord) -> Contender:
    """jax-linear-attention's kernels for Hopper."""
    return jitted(jax_linear.delta(), absent=jax_linear.missing(), library=jax_linear.LIBRARY)


RIVALS: dict[str, Callable[[Any], Contender]] = {"scan": _scan, "fla": _flash_delta, "jla": _jax_linear}


class DeltaRecord(HeadsRecord):
    """`gated_delta_rule`: heads are those of values; keys have length 1."""

    def abstract(self, shape: Shape) -> dict[str, jax.ShapeDtypeStruct]:
        """As of the linear operations with the heads of query and key for those of key and value, and beta."""
        fewer = shape.heads if shape.kv_heads is None else shape.kv_heads
        found = self.by_argument(dataclasses.replace(shape, kv_heads=None).abstract())
        narrow = jax.ShapeDtypeStruct((*found["query"].shape[:2], fewer, shape.key_channels), found["query"].dtype)
        beta = jax.ShapeDtypeStruct(found["value"].shape[:3], found["value"].dtype)
        return {**found, "query": narrow, "key": narrow, "beta": beta}

    def arrays(self, shape: Shape, strong_gates: bool = False) -> dict[str, jax.Array]:
        wanted = self.abstract(shape)
        drawn = self.by_argument(dataclasses.replace(shape, kv_heads=None).arrays(strong_gates))
        keys = jax.random.split(jax.random.key(7), 3)
        unit = lambda key, x: _unit(jax.random.normal(key, x.shape)).astype(x.dtype)
        beta = jax.nn.sigmoid(jax.random.normal(keys[2], wanted["beta"].shape)).astype(wanted["beta"].dtype)
        return {**drawn, "query": unit(keys[0], wanted["query"]), "key": unit(keys[1], wanted["key"]), "beta": beta}

    def usual_shapes(self, backend: str) -> Sequence[str]:
        if backend == "cpu":
            return [f"2x{T}x4x64x64" for T in (512, 1024, 2048, 4096)]
        return [f"8x{T}x16x128x128" for T in (1024, 2048, 4096, 8192)]

    def operations(self, shape: Shape, direction: str) -> int:
        """Those of the recurrence itself, which chunks exceed: per token and head 6 K V forward (the prediction, the update
        and the reading), 16 K V more backward (the states again, and the adjoint of each)."""
        rows = shape.batch * shape.heads * shape.time
        return rows * shape.key_channels * shape.value_channels * (6 if direction == "forward" else 22)

    def cases(self) -> Sequence[DeltaCase]:
        return CASES

    def judge(self, shape: Shape, arrays: Mapping[str, jax.Array], cotangent: jax.Array, gradients: bool) -> Judge:
        return of_recurrence(delta_reference, arrays, cotangent, gradients, Part.of(shape, grouped=GROUPED))


def _unit(x: jax.Array) -> jax.Array:
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


RECORDS = (
    DeltaRecord(
        operation=gated_delta_rule, kernel=GatedDeltaRule, legal_gates=("g", "gk"), gates=("g",), key_gate="g", rivals=RIVALS
    ),
)
