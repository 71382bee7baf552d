"""Shapes of attention calls, written as text: what tests, benchmarks and tuning share.

    BxTxHxKxV[:gates][:dtype]        2x4096x4x64x64, 8x2048x16/4x128x128:gk:bfloat16
    BxTxHxD[:gates][:dtype]          K = V = D

Grouped heads are `H/Hkv`; gates are joined by `+`, or `none`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp

from ejkernel.kernels._linear.gates import ARGUMENTS, CONSTANT, GATES
from ejkernel.kernels._linear.random import gate

NAMES = tuple(name for name in GATES if name != "g4")  # an operation that takes `gk` as its `g` says so in its record
DTYPES = ("float32", "bfloat16", "float16", "float64")
SHORT = {"f32": "float32", "fp32": "float32", "bf16": "bfloat16", "f16": "float16", "fp16": "float16", "half": "float16"}
_SIZES = re.compile(r"(\d+)x(\d+)x(\d+)(?:/(\d+))?x(\d+)(?:x(\d+))?")


def dtype_hint(words: Iterable[str]) -> str:
    """The whole names of dtypes that came by a short one, as the end of an error's text.

    >>> dtype_hint(["bf16", "gk"])
    ' bf16 is bfloat16 here.'
    """
    return "".join(f" {word} is {SHORT[word]} here." for word in words if word in SHORT)


def gate_hint(words: Iterable[str]) -> str:
    """What `g4`, the name that test cases have for a g per key channel, is in a shape; as the end of an error's text."""
    return " g4, a g per key channel, is gk here." if "g4" in words else ""


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of one call.

    Attributes:
        batch, time, heads, key_channels, value_channels: B, T, H, K, V.
        gates: any of g (per head), g_gamma, gk (per key channel), gv (per value channel).
        dtype: of every array.
        kv_heads: Hkv; None: as many as `heads`.
        name: what people call it.

    Example:
        >>> shape = Shape.parse("8x2048x16/4x128:gk+gv:bfloat16")
        >>> shape.value_channels, shape.kv_heads, shape.gates, shape.dtype
        (128, 4, ('gk', 'gv'), 'bfloat16')
        >>> str(shape)
        '8x2048x16/4x128x128:gk+gv:bfloat16'
    """

    batch: int
    time: int
    heads: int
    key_channels: int
    value_channels: int
    gates: tuple[str, ...] = ()
    dtype: str = "float32"
    kv_heads: int | None = None
    name: str = ""

    def __post_init__(self) -> None:
        for name in ("batch", "heads", "key_channels", "value_channels"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} of a shape must be at least 1; got {getattr(self, name)}.")
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            raise ValueError(f"kv_heads must divide heads; got {self.heads}/{self.kv_heads}.")
        for kind, given, legal in (("gate", self.gates, NAMES), ("dtype", (self.dtype,), DTYPES)):
            if wrong := [item for item in given if item not in legal]:
                raise ValueError(f"{kind} must be one of {', '.join(legal)}; got {', '.join(map(repr, wrong))}.")

    @classmethod
    def parse(cls, text: str, gates: tuple[str, ...] = (), dtype: str = "float32") -> Shape:
        """The shape that a text means; `gates` and `dtype` where the text has none. ValueError says what is legal."""
        sizes, *rest = text.strip().split(":")
        dtypes, named = ([part for part in rest if (part in DTYPES) is is_dtype] for is_dtype in (True, False))
        if wrong := [one for part in named if part != "none" for one in part.split("+") if one not in NAMES]:
            legal = f"gate must be one of {', '.join(NAMES)}, and a dtype one of {', '.join(DTYPES)}"
            raise ValueError(f"{legal}; got {', '.join(map(repr, wrong))} in {text!r}.{dtype_hint(wrong)}{gate_hint(wrong)}")
        found = _SIZES.fullmatch(sizes)
        if found is None or len(dtypes) > 1 or len(named) > 1:
            raise ValueError(f"a shape must be BxTxHxKxV or BxTxHxD, then :gates and :dtype if any; got {text!r}.")
        if named:
            gates = () if named[0] == "none" else tuple(named[0].split("+"))
        B, T, H, Hkv, K, V = (None if size is None else int(size) for size in found.groups())
        assert B is not None and T is not None and H is not None and K is not None  # noqa: PT018 (the pattern has them)
        return cls(B, T, H, K, K if V is None else V, gates, dtypes[0] if dtypes else dtype, Hkv)

    def __str__(self) -> str:
        heads = str(self.heads) if self.kv_heads is None else f"{self.heads}/{self.kv_heads}"
        gates = f":{'+'.join(self.gates)}" if self.gates else ""
        return f"{self.batch}x{self.time}x{heads}x{self.key_channels}x{self.value_channels}{gates}:{self.dtype}"

    def sizes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every array by the name of its argument."""
        rows = (self.batch, self.time)
        kv_heads = self.heads if self.kv_heads is None else self.kv_heads
        gates = [GATES[name] for name in self.gates]
        return {
            "query": (*rows, self.heads, self.key_channels),
            "key": (*rows, kv_heads, self.key_channels),
            "value": (*rows, kv_heads, self.value_channels),
            **{
                gate.argument: gate.shape(() if gate.constant else rows, self.heads, self.key_channels, self.value_channels)
                for gate in gates
            },
        }

    def abstract(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Every array as its shape and dtype."""
        return {name: jax.ShapeDtypeStruct(size, self._dtype(name)) for name, size in self.sizes().items()}

    def output(self) -> jax.ShapeDtypeStruct:
        """The output, `[B, T, H, V]`, as its shape and dtype."""
        return jax.ShapeDtypeStruct((self.batch, self.time, self.heads, self.value_channels), jnp.dtype(self.dtype))

    def arrays(self, strong_gates: bool = False) -> dict[str, jax.Array]:
        """Normal q, k, v and weak gates.

        Args:
            strong_gates: some runs of tokens with strong gates and some with resets among the weak ones, as tuning draws them.
        """
        keys = jax.random.split(jax.random.key(0), len(self.sizes()))
        drawn = {}
        for key, (name, size) in zip(keys, self.sizes().items(), strict=True):
            if name in ARGUMENTS:
                time_axis = 1 if strong_gates and name not in CONSTANT else None
                drawn[name] = gate(key, size, self._dtype(name), time_axis)
            else:
                drawn[name] = jax.random.normal(key, size).astype(self._dtype(name))
        return drawn

    def cotangent(self) -> jax.Array:
        """A normal gradient of the output, `[B, T, H, V]`."""
        return jax.random.normal(jax.random.key(5), self.output().shape).astype(self.dtype)

    def _dtype(self, name: str) -> Any:
        small = jnp.dtype(self.dtype).itemsize < 4
        return jnp.float32 if name in CONSTANT and small else jnp.dtype(self.dtype)  # stays in float32 in practice


# Linear-attention layers small enough for a CPU with two cores.
CPU = [
    Shape(8, 1, 4, 64, 64, ("gk",), name="decode"),
    Shape(2, 128, 4, 64, 64, ("gk",), name="short, per key"),
    Shape(2, 2048, 4, 32, 32, ("g",), name="retention"),
    Shape(2, 2048, 4, 64, 64, name="linear"),
    Shape(2, 2048, 4, 64, 64, ("g",), name="simple GLA"),
    Shape(2, 2048, 4, 64, 64, ("gk",), name="GLA"),
    Shape(2, 2048, 4, 64, 64, ("gk", "gv"), name="key and value gates"),
    Shape(2, 2048, 4, 128, 128, ("g",), name="wide, scalar"),
    Shape(1, 2048, 4, 128, 128, ("gk",), name="wide, per key"),
    Shape(1, 16384, 2, 64, 64, ("g",), name="long"),
]
