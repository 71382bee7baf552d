"""Shapes of linear-attention layers that tests, benchmarks and tuning share: (B, T, H, K, V) and the gates given."""

from __future__ import annotations

from typing import NamedTuple


class Shape(NamedTuple):
    name: str
    batch: int
    time: int
    heads: int
    key_channels: int
    value_channels: int
    gates: tuple[str, ...] = ()


# Small enough for a CPU with two cores.
CPU = [
    Shape("decode", 8, 1, 4, 64, 64, ("gk",)),
    Shape("short, per key", 2, 128, 4, 64, 64, ("gk",)),
    Shape("retention", 2, 2048, 4, 32, 32, ("g",)),
    Shape("linear", 2, 2048, 4, 64, 64),
    Shape("simple GLA", 2, 2048, 4, 64, 64, ("g",)),
    Shape("GLA", 2, 2048, 4, 64, 64, ("gk",)),
    Shape("key and value gates", 2, 2048, 4, 64, 64, ("gk", "gv")),
    Shape("wide, scalar", 2, 2048, 4, 128, 128, ("g",)),
    Shape("wide, per key", 1, 2048, 4, 128, 128, ("gk",)),
    Shape("long", 1, 16384, 2, 64, 64, ("g",)),
]
