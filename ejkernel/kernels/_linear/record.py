"""The records of the linear operations: what verifies, measures and tunes them, and whom they are measured against."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

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
from ejkernel.testing import flash_linear, jax_linear
from ejkernel.testing.contenders import Contender, jitted
from ejkernel.testing.hand_written import scan_attention
from ejkernel.testing.judge import Judge, Part, of_recurrence
from ejkernel.testing.linear_cases import CASES, LAYER, LIGHTNING_CASES, LinearCase
from ejkernel.testing.linear_reference import linear_reference
from ejkernel.testing.record import HeadsRecord
from ejkernel.testing.shapes import NAMES, Shape


def _scan(record: LinearRecord) -> Contender:
    """The `lax.scan` that people write by hand, with its autodiff."""
    return jitted(lambda **arrays: scan_attention(**record.completed(arrays))[0])


def _flash_linear(record: LinearRecord) -> Contender:
    """flash-linear-attention, on torch copies of the arrays."""
    return flash_linear.contender(flash_linear.FlashLinear, record.completed)


def _jax_linear(record: LinearRecord) -> Contender:
    """jax-linear-attention's kernels for Hopper."""
    run = jax_linear.linear()
    return jitted(lambda **arrays: run(**record.completed(arrays)), absent=jax_linear.missing(), library=jax_linear.LIBRARY)


RIVALS: dict[str, Callable[[Any], Contender]] = {"scan": _scan, "fla": _flash_linear, "jla": _jax_linear}


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
        """Those whose gates are arguments of the operation; `g4` of a case is `g` per key channel."""
        legal = {name for name in GATES if GATES[name].argument in inspect.signature(self.operation).parameters}
        return [case for case in CASES if set(case.gates) <= legal]

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
    LinearRecord(operation=recurrent_attention, kernel=RecurrentAttention, legal_gates=NAMES, gates=("gk",), rivals=RIVALS),
    LinearRecord(
        operation=gla_attention,
        kernel=GLAttention,
        legal_gates=("g", "gk", "g_gamma"),
        gates=("gk",),
        key_gate="g",
        rivals=RIVALS,
    ),
    LightningRecord(operation=lightning_attention, kernel=LightningAttention, options=LAYER, rivals=RIVALS),
)
