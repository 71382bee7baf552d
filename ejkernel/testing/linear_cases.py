"""Calls of the linear operations that every implementation must get right."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._linear.gates import ARGUMENTS, CONSTANT, GATES
from ejkernel.kernels._linear.operations import lightning, lightning_decay, recurrent
from ejkernel.kernels._linear.problem import LinearProblem
from ejkernel.testing.compare import LINEAR_TOLERANCES
from ejkernel.testing.evaluation import Implementation, RecurrenceCase
from ejkernel.testing.linear_reference import linear_reference

GATE_KINDS: dict[str, Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]] = {
    "mild": lambda rng, shape: -np.exp(rng.normal(size=shape)) / 16,
    "strong": lambda rng, shape: -np.exp(rng.normal(size=shape)) * 8,
    "twenty": lambda rng, shape: rng.normal(size=shape) * 0.1 - 20,
    "resets": lambda rng, shape: np.where(rng.random(shape) < 0.1, -1e4, -np.exp(rng.normal(size=shape)) / 16),
    "infinite": lambda rng, shape: np.where(rng.random(shape) < 0.1, -np.inf, -np.exp(rng.normal(size=shape)) / 16),
    "zero": lambda rng, shape: np.zeros(shape),
    "positive": lambda rng, shape: rng.normal(size=shape) * 0.03 + 0.01,
    "everything": lambda rng, shape: rng.choice([0.0, -1e-3, -1.0, -30.0, -1e4, -np.inf], size=shape),
}


@dataclasses.dataclass(frozen=True)
class LinearCase(RecurrenceCase):
    """One call, made from a seed.

    Attributes:
        gates: which of g (per head), g4 (`g` per key channel), g_gamma, gk, gv are given.
        gate_kind: a name of `GATE_KINDS`.
        gates_per_kv_head: whether gates have `kv_heads` heads.
        lengths: packs sequences of these lengths; `time` is then their sum.
        rank3: packed without a batch.
    """

    name: str
    batch: int = 2
    time: int = 50
    heads: int = 2
    kv_heads: int = 2
    key_channels: int = 16
    value_channels: int = 16
    gates: tuple[str, ...] = ()
    gate_kind: str = "mild"
    gates_per_kv_head: bool = False
    initial_state: bool = False
    lengths: tuple[int, ...] | None = None
    rank3: bool = False
    reverse: bool = False
    scale: float | None = None
    dtype: str = "float32"
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    @property
    def tolerance(self) -> tuple[float, float]:
        return LINEAR_TOLERANCES[self.dtype]

    def arguments(self) -> tuple[dict[str, jax.Array], dict[str, Any]]:
        """(differentiable arrays, other arguments) of the call."""
        rng = np.random.default_rng(self.seed)
        batch, time = (1, sum(self.lengths)) if self.lengths is not None else (self.batch, self.time)
        sequences = batch if self.lengths is None else len(self.lengths)
        shape = (time,) if self.rank3 else (batch, time)
        gate_heads = self.kv_heads if self.gates_per_kv_head else self.heads
        K, V = self.key_channels, self.value_channels
        arrays = {
            "query": rng.normal(size=(*shape, self.heads, K)),
            "key": rng.normal(size=(*shape, self.kv_heads, K)),
            "value": rng.normal(size=(*shape, self.kv_heads, V)),
        }
        for gate in (GATES[name] for name in self.gates):
            rows, heads = ((sequences,), self.heads) if gate.constant else (shape, gate_heads)
            arrays[gate.argument] = GATE_KINDS[self.gate_kind](rng, gate.shape(rows, heads, K, V))
        if self.initial_state:
            arrays["initial_state"] = rng.normal(size=(sequences, self.heads, K, V))
        options: dict[str, Any] = {"reverse": self.reverse, "softmax_scale": self.scale}
        if self.lengths is not None:
            options["cu_seqlens"] = jnp.asarray(np.cumsum([0, *self.lengths]), jnp.int32)
        dtype = jnp.dtype(self.dtype)
        keep = {*CONSTANT, "initial_state"} if dtype.itemsize < 4 else set()  # these stay in float32 in practice
        return {name: jnp.asarray(x, jnp.float32 if name in keep else dtype) for name, x in arrays.items()}, options

    @property
    def problem(self) -> LinearProblem:
        """The call as an implementation sees it."""
        arrays, options = self.arguments()
        return recurrent(**arrays, **options)

    def weights(self) -> tuple[np.ndarray, np.ndarray]:
        """Random factors of output and final state in the loss whose gradients are compared."""
        rng = np.random.default_rng(self.seed + 1)
        arrays, options = self.arguments()
        sequences = len(options["cu_seqlens"]) - 1 if "cu_seqlens" in options else arrays["query"].shape[0]
        output = (*arrays["query"].shape[:-1], self.value_channels)
        return rng.normal(size=output), rng.normal(size=(sequences, self.heads, self.key_channels, self.value_channels))

    def reference(self) -> Implementation:
        return linear_reference


LAYER = {"layer_idx": 1, "num_layers": 12}  # where lightning attention is verified and measured


class LightningCase(LinearCase):
    """One call of lightning attention, whose decay follows from the layer: it has no gates."""

    def arguments(self) -> tuple[dict[str, jax.Array], dict[str, Any]]:
        arrays, options = super().arguments()
        return arrays, {**options, **LAYER}

    @property
    def problem(self) -> LinearProblem:
        arrays, options = self.arguments()
        return lightning(**arrays, **options)

    def reference(self) -> Implementation:
        decays = np.float64 if self.dtype == "float64" else np.float32  # as wide as every implementation has them
        return _of_the_layer(self.heads, decays)


@functools.cache
def _of_the_layer(heads: int, decays: Any) -> Implementation:
    def call(*, layer_idx: int, num_layers: int, **rest: Any) -> tuple[jax.Array, jax.Array]:
        return linear_reference(**rest, g_gamma=lightning_decay(heads, layer_idx, num_layers, decays))

    return call


def _gate_cases() -> list[LinearCase]:
    combinations = [(), ("g",), ("g_gamma",), ("g4",), ("gk",), ("gv",), ("g", "g_gamma"), ("gk", "gv"), ("g", "gv"),
                    ("g4", "gk", "gv", "g_gamma"), ("g", "g_gamma", "gk", "gv")]  # fmt: skip
    named = [LinearCase(_label(gates), gates=gates, initial_state=True) for gates in combinations]
    kinds = [
        LinearCase(f"{'-'.join(gates)}-{kind}", gates=gates, gate_kind=kind, time=70, initial_state=True)
        for kind in GATE_KINDS
        if kind != "mild"
        for gates in (("g",), ("gk",), ("gk", "gv"))
    ]
    return [*named, *kinds]


def _label(gates: tuple[str, ...]) -> str:
    return "-".join(gates) or "ungated"


ALL_GATES = ARGUMENTS
SOME_GATES = ((), ("g",), ("gk",), ALL_GATES)
UNEVEN = (13, 0, 40, 1, 27, 0)
CASES: list[LinearCase] = [
    *_gate_cases(),
    *(LinearCase(f"time-{t}", time=t, gates=("gk",), initial_state=True) for t in (0, 1, 2, 3, 16, 17, 64, 129)),
    *(LinearCase(f"scalar-time-{t}", time=t, gates=("g",)) for t in (1, 5, 32, 100)),
    LinearCase("odd-channels", key_channels=5, value_channels=9, gates=("gk",), initial_state=True),
    LinearCase("one-channel", key_channels=1, value_channels=1, gates=("g", "gv")),
    LinearCase("wide-values", key_channels=24, value_channels=40, gates=("g",)),
    LinearCase("grouped", heads=6, kv_heads=2, gates=("gk",), initial_state=True),
    LinearCase("grouped-gates", heads=4, kv_heads=2, gates=ALL_GATES, gates_per_kv_head=True),
    LinearCase("grouped-scalar", heads=4, kv_heads=1, gates=("g",), gates_per_kv_head=True),
    *(LinearCase(f"reverse-{_label(g)}", gates=g, reverse=True, initial_state=True) for g in SOME_GATES),
    *(
        LinearCase(f"packed-{_label(g)}{'-reverse' * r}", gates=g, lengths=UNEVEN, reverse=r, initial_state=True)
        for g in SOME_GATES
        for r in (False, True)
    ),
    LinearCase("packed-rank3", gates=("g4",), lengths=(5, 9, 2), rank3=True, initial_state=True),
    LinearCase("packed-one", gates=("g",), lengths=(33,), rank3=True),
    LinearCase("packed-without-state", gates=("gk",), lengths=(20, 20)),
    LinearCase("scale", gates=("g",), scale=0.7),
    *(
        LinearCase(f"{dtype}-{_label(g)}-{kind}", gates=g, dtype=dtype, gate_kind=kind, time=70, initial_state=True)
        for dtype in ("bfloat16", "float16")
        for g, kind in (((), "mild"), (("g",), "resets"), (("gk",), "mild"), (("gk",), "strong"), (("gk", "gv"), "infinite"))
    ),
    *(
        LinearCase(
            f"bfloat16-{channels}-channels-{_label(g)}-{kind}", gates=g, gate_kind=kind, dtype="bfloat16", batch=1, time=70,
            heads=2, kv_heads=1, key_channels=channels, value_channels=channels, initial_state=True,
        )
        for channels, g, kind in (
            (64, ("g",), "resets"), (64, ("gk",), "strong"), (64, ("gk", "gv"), "strong"),
            (128, ("g",), "strong"), (128, ("gk",), "resets"), (128, ("gk", "gv"), "everything"),
        )
    ),
    LinearCase("bfloat16-packed", gates=("g4",), dtype="bfloat16", lengths=(30, 3, 40), initial_state=True),
]  # fmt: skip
# The shared calls without their gates, as far as they still differ.
LIGHTNING_CASES: list[LightningCase] = list(
    {
        dataclasses.replace(bare, name=""): bare
        for case in reversed(CASES)
        for bare in [LightningCase(**vars(case) | {"gates": (), "gate_kind": "mild", "gates_per_kv_head": False})]
    }.values()
)[::-1]
