"""What a route is: one way to compute a call, forward and backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

from ejkernel.kernels._linear.config import RecurrenceConfig
from ejkernel.kernels._triton.linear._call import Call
from ejkernel.kernels._triton.linear._chunks import Array
from ejkernel.kernels._triton.linear._plan import Plan

Saved = dict[str, Any]
Changes = Sequence[dict[str, Any]]  # fields of a configuration


class Gradients(NamedTuple):
    """Gradients per head [B, T, H, ...]; None where there is no such argument."""

    query: Array
    key: Array
    value: Array
    initial_state: Array
    log_decay: Array | None = None  # [B, T, H]: of the log decay that g and g_gamma add up to
    gk: Array | None = None
    gv: Array | None = None
    beta: Array | None = None  # of the delta rule


@dataclasses.dataclass(frozen=True)
class Route:
    """One way to compute a call. Static data: what varies inside a route is decided when it is chosen and stands in its fields.

    Forward and backward are of one route, so neither asks again what the other did.
    """

    plan: Plan
    title: ClassVar[str]
    covers: ClassVar[str]  # the calls that take it, for readers

    @classmethod
    def covering(cls, plan: Plan) -> Route | None:
        """The route for a call, or None where it does not cover it. The first of `CHUNKED` that covers a call is taken."""
        raise NotImplementedError

    @property
    def name(self) -> str:
        """What `report()` shows."""
        return self.title

    def differentiated(self, *, constant_decay: bool) -> Route:
        """The route of a call whose gradient will be asked for. constant_decay: whether that of g_gamma will be, too."""
        return self

    def agreed(self, arrays: dict[str, Any], cu_seqlens: Array | None) -> Route:
        """With what forward and backward must agree on even where `vmap` or a mesh gives one of them another batch."""
        return self

    def forward(self, call: Call, keep: bool) -> tuple[Array, Array, Saved]:
        """(output, final state, what `backward` starts from if it is to be kept)."""
        raise NotImplementedError

    def stored_bytes(self, call: Call) -> int:
        """Bytes of the states that `forward` stores even where nothing is kept."""
        return 0

    def recomputed(self, call: Call) -> Saved:
        """What `forward` would have kept, for a call that went step by step."""
        return self.forward(call, keep=True)[2]

    def backward(self, call: Call, saved: Saved, do: Array, dfinal: Array | None) -> Gradients:
        """The gradients; dfinal is None where the final state has none."""
        raise NotImplementedError

    def changes(self) -> Changes:
        """What the tuner may change of the heuristic's configuration: one or two fields each."""
        raise NotImplementedError

    def refuses(self, cfg: RecurrenceConfig) -> str | None:
        """Why no kernel of this route would read a field of the configuration; None when each is read."""
        return None
