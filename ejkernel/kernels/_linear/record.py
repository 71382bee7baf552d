"""The records of the linear operations: what verifies, measures and tunes them, and whom they are measured against."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._linear.gates import CONSTANT, GATES
from ejkernel.kernels._linear.operations import lightning_decay
from ejkernel.modules import (
    GLAttention,
    LightningAttention,
    RecurrentAttention,
    gla_attention,
    lightning_attention,
    recurrent_attention,
)
from ejkernel.testing import flash_linear
from ejkernel.testing.contenders import Arrays, Contender, jitted
from ejkernel.testing.hand_written import scan_attention
from ejkernel.testing.judge import Judge, Part, of_recurrence
from ejkernel.testing.linear_cases import CASES, LAYER, LIGHTNING_CASES, LinearCase
from ejkernel.testing.linear_reference import linear_reference
from ejkernel.testing.record import HeadsRecord
from ejkernel.testing.shapes import Shape


def _scan(record: LinearRecord) -> Contender:
    """The `lax.scan` that people write by hand, with its autodiff."""
    return jitted(lambda **arrays: scan_attention(**record.completed(arrays))[0])


def _flash_linear(record: LinearRecord) -> Contender:
    """flash-linear-attention, on torch copies of the arrays."""

    def prepare(direction: str, arrays: Arrays) -> Callable[[jax.Array], Any]:
        shape = (*arrays["query"].shape[:3], arrays["value"].shape[-1])
        named = record.completed(arrays)
        made: dict[int, flash_linear.FlashLinear] = {}

        def run(cotangent: jax.Array) -> Any:
            if id(cotangent) not in made:  # torch copies its arguments once, not in every call that is timed
                made.clear()
                made[id(cotangent)] = flash_linear.FlashLinear(named, jnp.broadcast_to(cotangent, shape))
            call = made[id(cotangent)]
            return call.forward() if direction == "forward" else call.both()

        return run

    return Contender(prepare, flash_linear.FlashLinear.wait, flash_linear.missing())


RIVALS: dict[str, Callable[[Any], Contender]] = {"scan": _scan, "fla": _flash_linear}


class LinearRecord(HeadsRecord):
    """A linear operation: gates are what distinguishes its calls."""

    def completed(self, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """The arrays with the gates that the operation adds by itself, as arguments of `recurrent_attention`."""
        return dict(arrays)

    def usual_shapes(self, backend: str) -> Sequence[str]:
        if backend == "cpu":
            return [f"2x{T}x4x64x64" for T in (512, 1024, 2048, 4096)]
        return [f"8x{T}x16x128x128" for T in (1024, 2048, 4096, 8192)]

    def operations(self, shape: Shape, direction: str) -> int:
        """Those of the recurrence itself, which chunked kernels exceed: per token and head 4 K V forward (the state's update
        and its reading), 10 K V more backward (the states again, the gradients of q, k, v, and the state's own)."""
        rows = shape.batch * shape.heads * shape.time
        return rows * shape.key_channels * shape.value_channels * (4 if direction == "forward" else 14)

    def cases(self) -> Sequence[LinearCase]:
        return [case for case in CASES if set(case.gates) <= set(self.legal_gates)]

    def judge(self, shape: Shape, arrays: Mapping[str, jax.Array], cotangent: jax.Array, gradients: bool) -> Judge:
        part = Part.of(shape, constant=CONSTANT)
        return of_recurrence(linear_reference, self.completed(arrays), cotangent, gradients, part)


class LightningRecord(LinearRecord):
    """The linear operation whose only decay follows from the layer."""

    def completed(self, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return {**arrays, "g_gamma": lightning_decay(arrays["query"].shape[2], LAYER["layer_idx"], LAYER["num_layers"])}

    def cases(self) -> Sequence[LinearCase]:
        return LIGHTNING_CASES


RECORDS = (
    LinearRecord(operation=recurrent_attention, kernel=RecurrentAttention, legal_gates=(*GATES,), gates=("gk",), rivals=RIVALS),
    LinearRecord(operation=gla_attention, kernel=GLAttention, legal_gates=("g", "g4", "g_gamma"), gates=("g4",), rivals=RIVALS),
    LightningRecord(operation=lightning_attention, kernel=LightningAttention, options=LAYER, rivals=RIVALS),
)
