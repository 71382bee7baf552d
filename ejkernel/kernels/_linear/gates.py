"""The gates of the linear operations: what each of them decays, which tells its shape.

Checks, shared cases, shapes as text, random inputs and the axes that a mesh may split all read this one table.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

Channels = Literal["key", "value"]


@dataclasses.dataclass(frozen=True)
class Gate:
    """One kind of log decay.

    Attributes:
        argument: the argument that it is given by.
        channels: whose channels have a decay each: "key" for a row of the state, "value" for a column; None: the whole state.
        constant: whether it is the same at every step.
    """

    argument: str
    channels: Channels | None = None
    constant: bool = False

    def shape(self, rows: tuple[int, ...], heads: int, key_channels: int, value_channels: int) -> tuple[int, ...]:
        """The gate's shape for `rows` (batch and time, or sequences where it is constant)."""
        sizes: dict[str | None, tuple[int, ...]] = {None: (), "key": (key_channels,), "value": (value_channels,)}
        return (*rows, heads, *sizes[self.channels])


GATES = {
    "g": Gate("g"),
    "g4": Gate("g", "key"),  # `g` of rank 4, which is added to gk
    "g_gamma": Gate("g_gamma", constant=True),
    "gk": Gate("gk", "key"),
    "gv": Gate("gv", "value"),
}
ARGUMENTS = tuple(dict.fromkeys(gate.argument for gate in GATES.values()))
CONSTANT = tuple(gate.argument for gate in GATES.values() if gate.constant)
PER_TOKEN = tuple(name for name in ARGUMENTS if name not in CONSTANT)
