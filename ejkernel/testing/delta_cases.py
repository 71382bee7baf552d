"""Calls of the gated delta rule that every implementation must get right."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.kernels._delta import DeltaProblem
from ejkernel.testing.compare import LINEAR_TOLERANCES, relative_rms
from ejkernel.testing.delta_reference import delta_reference
from ejkernel.testing.evaluation import Implementation, RecurrenceCase, jitted
from ejkernel.testing.linear_cases import GATE_KINDS

Draw = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt(np.sum(x * x, -1, keepdims=True))


def _around_one_direction(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Unit vectors at a cosine of about 0.9 to each other."""
    return _unit(_unit(rng.normal(size=shape[-1:])) * 3 + _unit(rng.normal(size=shape)))


# In "identical", "correlated" and "raw" the rule amplifies rounding, more so with beta near 2.
KEY_KINDS: dict[str, Draw] = {
    "unit": lambda rng, shape: _unit(rng.normal(size=shape)),
    "correlated": _around_one_direction,
    "identical": lambda rng, shape: np.broadcast_to(_unit(rng.normal(size=shape[-1:])), shape),
    "raw": lambda rng, shape: rng.normal(size=shape) * 1.7 * shape[-1] ** -0.5,
}
BETA_KINDS: dict[str, Draw] = {
    "usual": lambda rng, shape: 1 / (1 + np.exp(-rng.normal(size=shape))),
    "to two": lambda rng, shape: 2 / (1 + np.exp(-rng.normal(size=shape))),
    "near two": lambda rng, shape: 2 - 0.05 * rng.random(size=shape),
    "zero": lambda rng, shape: np.zeros(shape),
    "some zero": lambda rng, shape: rng.random(size=shape) * (rng.random(size=shape) < 0.5),
}


@dataclasses.dataclass(frozen=True)
class DeltaCase(RecurrenceCase):
    """One call, made from a seed.

    Attributes:
        heads: value heads; `key_heads` divides them.
        gate: None, "head" (`g [B, T, H]`) or "channel" (`g [B, T, H, K]`).
        gate_kind, key_kind, beta_kind: names in `GATE_KINDS`, `KEY_KINDS`, `BETA_KINDS`.
        lengths: packs sequences of these lengths; `time` is then their sum.
        rank3: packed without a batch.
    """

    name: str
    batch: int = 2
    time: int = 70
    heads: int = 2
    key_heads: int = 2
    key_channels: int = 16
    value_channels: int = 16
    gate: str | None = None
    gate_kind: str = "mild"
    key_kind: str = "unit"
    beta_kind: str = "usual"
    initial_state: bool = False
    lengths: tuple[int, ...] | None = None
    rank3: bool = False
    reverse: bool = False
    l2norm: bool = False
    scale: float | None = None
    dtype: str = "float32"
    seed: int = 0

    def __str__(self) -> str:
        return self.name

    @property
    def problem(self) -> DeltaProblem:
        """The call as an implementation sees it."""
        arrays, options = self.arguments()
        return DeltaProblem.from_arguments(**arrays, **options)

    @property
    def amplifies(self) -> bool:
        """Whether the rule itself amplifies rounding, so that the measure is the step-by-step form's own error."""
        return self.key_kind in ("identical", "correlated") or (self.key_kind == "raw" and not self.l2norm)

    def arguments(self) -> tuple[dict[str, jax.Array], dict[str, Any]]:
        """(differentiable arrays, other arguments) of the call."""
        rng = np.random.default_rng(self.seed)
        batch, time = (1, sum(self.lengths)) if self.lengths is not None else (self.batch, self.time)
        sequences = batch if self.lengths is None else len(self.lengths)
        shape = (time,) if self.rank3 else (batch, time)
        K, V = self.key_channels, self.value_channels
        arrays = {
            "query": KEY_KINDS["raw" if self.key_kind == "raw" else "unit"](rng, (*shape, self.key_heads, K)),
            "key": KEY_KINDS[self.key_kind](rng, (*shape, self.key_heads, K)),
            "value": rng.normal(size=(*shape, self.heads, V)),
            "beta": BETA_KINDS[self.beta_kind](rng, (*shape, self.heads)),
        }
        if self.gate is not None:
            channels = {"head": (), "channel": (K,)}[self.gate]
            arrays["g"] = GATE_KINDS[self.gate_kind](rng, (*shape, self.heads, *channels))
        if self.initial_state:
            arrays["initial_state"] = rng.normal(size=(sequences, self.heads, K, V))
        options: dict[str, Any] = {"reverse": self.reverse, "softmax_scale": self.scale, "use_qk_l2norm": self.l2norm}
        if self.lengths is not None:
            options["cu_seqlens"] = jnp.asarray(np.cumsum([0, *self.lengths]), jnp.int32)
        dtype = jnp.dtype(self.dtype)
        keep = {"initial_state"} if dtype.itemsize < 4 else set()  # which stays in float32 in practice
        return {name: jnp.asarray(x, jnp.float32 if name in keep else dtype) for name, x in arrays.items()}, options

    def weights(self) -> tuple[np.ndarray, np.ndarray]:
        """Random factors of output and final state in the loss whose gradients are compared."""
        rng = np.random.default_rng(self.seed + 1)
        arrays, options = self.arguments()
        sequences = len(options["cu_seqlens"]) - 1 if "cu_seqlens" in options else arrays["query"].shape[0]
        state = (sequences, self.heads, self.key_channels, self.value_channels)
        return rng.normal(size=arrays["value"].shape), rng.normal(size=state)

    def reference(self) -> Implementation:
        return delta_reference

    @functools.cached_property
    def tolerance(self) -> tuple[float, float]:
        """The largest errors allowed of values and gradients.

        Where the rule amplifies rounding: 4 times the largest error of the float32 step-by-step form, if that is more.
        """
        values, gradients = LINEAR_TOLERANCES[self.dtype]
        if not self.amplifies or self.dtype == "float64":
            return values, gradients
        narrow = {name: x.astype(jnp.float32) for name, x in self.arguments()[0].items()}
        got, want = jitted(_STEP_BY_STEP, self.static(), narrow, self.weights()), self.expected()
        errors = {name: relative_rms(got[name], want[name]) for name in want}
        of_values = max(errors[name] for name in ("output", "state"))
        return max(values, 4 * of_values), max(gradients, 4 * max(errors.values()))


_STEP_BY_STEP = functools.partial(delta_reference, dtype=jnp.float32)


def _label(gate: str | None) -> str:
    return gate or "ungated"


GATES = (None, "head", "channel")
GATED = ("head", "channel")
UNEVEN = (13, 0, 33)
CASES: list[DeltaCase] = [
    *(DeltaCase(_label(g), gate=g, initial_state=True) for g in GATES),
    *(
        DeltaCase(f"{g}-{kind}", gate=g, gate_kind=kind, initial_state=True)
        for g in GATED
        for kind in GATE_KINDS
        if kind != "mild"
    ),
    *(
        DeltaCase(f"{_label(g)}-{keys}-{beta.replace(' ', '-')}", gate=g, key_kind=keys, beta_kind=beta, initial_state=True)
        for g, keys, beta in (
            (None, "correlated", "near two"), ("head", "correlated", "to two"), ("channel", "correlated", "near two"),
            (None, "identical", "near two"), ("head", "identical", "usual"), ("channel", "identical", "to two"),
            (None, "raw", "usual"), ("head", "raw", "to two"), ("channel", "raw", "usual"),
            (None, "unit", "to two"), ("head", "unit", "zero"), ("channel", "unit", "some zero"),
        )
    ),
    *(DeltaCase(f"time-{t}", time=t, gate="channel", initial_state=True) for t in (0, 1, 17)),
    DeltaCase("whole-chunks", time=64, gate="head"),
    DeltaCase("odd-channels", key_channels=5, value_channels=9, gate="channel", initial_state=True),
    DeltaCase("one-channel", key_channels=1, value_channels=1, gate="head"),
    *(DeltaCase(f"grouped-{g}", heads=6, key_heads=2, gate=g, initial_state=True) for g in GATED),
    *(DeltaCase(f"reverse-{g}", gate=g, reverse=True, initial_state=True) for g in GATED),
    *(
        DeltaCase(f"packed-{g}{'-reverse' * r}", gate=g, lengths=UNEVEN, reverse=r, initial_state=True)
        for g in GATED
        for r in (False, True)
    ),
    DeltaCase("packed-rank3", gate="channel", lengths=(5, 9), rank3=True, heads=4, initial_state=True),
    DeltaCase("packed-without-state", lengths=(20, 20)),
    DeltaCase("l2norm", gate="head", key_kind="raw", l2norm=True, heads=4, scale=0.7),
    DeltaCase("l2norm-packed", gate="channel", key_kind="raw", l2norm=True, lengths=(9, 0, 14), reverse=True),
    *(
        DeltaCase(f"{dtype}-{g}-{kind}", gate=g, gate_kind=kind, dtype=dtype, initial_state=True)
        for dtype, g, kind in (
            ("bfloat16", "head", "resets"), ("bfloat16", "channel", "mild"), ("bfloat16", "channel", "infinite"),
            ("float16", "channel", "strong"),
        )
    ),
    DeltaCase("bfloat16-ungated", dtype="bfloat16", key_kind="raw", l2norm=True),
    *(
        DeltaCase(
            f"bfloat16-{channels}-channels-{_label(g)}-{kind}", gate=g, gate_kind=kind, dtype="bfloat16", batch=1, key_heads=1,
            key_channels=channels, value_channels=channels, initial_state=True,
        )
        for channels, g, kind in (
            (64, None, "mild"), (64, "head", "resets"), (128, "head", "strong"), (64, "channel", "strong"),
            (128, "channel", "everything"),
        )
    ),
]  # fmt: skip
