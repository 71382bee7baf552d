"""Programs whose time is split over simulated devices, compiled to be counted: what a device receives and computes."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ejkernel.kernels._linear import LinearProblem
from ejkernel.kernels._linear.config import Exchange
from ejkernel.modules import GatedDeltaRuleConfig, GLAttentionConfig, gated_delta_rule, gla_attention
from ejkernel.testing.operations import counted

ROWS = 64  # tokens of a chunk
Gates = Literal["head", "channel", "delta", "delta-channel"]


@dataclasses.dataclass(frozen=True)
class SplitProgram:
    """One call of one row, in float32 on xla, forward and backward or forward alone.

    Attributes:
        gates: one per head or per key channel, of the linear operations or of the delta rule.
        tokens: of the whole sequence.
        devices: over which time is split. 1 with exchange None: the call without a sequence axis.
    """

    gates: Gates
    tokens: int
    devices: int
    exchange: Exchange | None
    heads: int = 2
    channels: int = 64
    gradient: bool = True

    @property
    def delta(self) -> bool:
        return self.gates.startswith("delta")

    def arrays(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The arguments, placed on the devices."""
        per_head, per_channel = (1, self.tokens, self.heads), (1, self.tokens, self.heads, self.channels)
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("query", "key", "value"), per_channel)
        shapes["g"] = per_channel if "channel" in self.gates else per_head
        shapes |= {"beta": per_head} if self.delta else {}
        placed = NamedSharding(self._mesh(), self._spec())
        return {name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=placed) for name, shape in shapes.items()}

    def _mesh(self) -> jax.sharding.Mesh:
        devices = jax.devices()[: self.devices]
        return jax.make_mesh((self.devices,), ("time",), axis_types=(AxisType.Auto,), devices=devices)

    def _spec(self) -> PartitionSpec:
        return PartitionSpec() if self.exchange is None else PartitionSpec(None, "time")

    def compiled(self) -> Any:
        """The program of one device, of arrays by name: the output, and with `gradient` the gradient of every array."""
        call: Any = gated_delta_rule if self.delta else gla_attention
        kind: Any = GatedDeltaRuleConfig if self.delta else GLAttentionConfig
        cfg, axis = kind(block_q=ROWS, platform="xla", exchange=self.exchange), "time" if self.exchange else None
        arrays, spec = self.arrays(), self._spec()
        run: Any = lambda arrays: call(**arrays, cfg=cfg, sequence_axis=axis)
        if axis is not None:
            run = jax.shard_map(run, mesh=self._mesh(), in_specs=(dict.fromkeys(arrays, spec),), out_specs=spec)

        def both(arrays: dict[str, jax.Array]) -> Any:
            output, pull = jax.vjp(run, arrays)
            return output, pull(jnp.ones_like(output))  # the output too: a compiler leaves away what nobody asks for

        return jax.jit(both if self.gradient else run).lower(arrays).compile()

    def text(self) -> str:
        """The compiled program."""
        return _text(self)

    def operations(self) -> float:
        """Of one device: products and elementwise ones, loops as often as they run."""
        return counted(self.text(), self._trips())

    def _trips(self) -> int:
        """Of the linear operations' loops on xla, which take several chunks at a time; the program does not say it."""
        from ejkernel.kernels._xla.linear._solve import _plan

        if self.delta:
            return 0
        tokens = self.tokens // self.devices
        row: Any = jax.ShapeDtypeStruct((1, tokens, self.heads, self.channels), jnp.float32)
        gate: Any = jax.ShapeDtypeStruct(row.shape[:3], jnp.float32)
        problem = LinearProblem(row, row, row, g=gate) if self.gates == "head" else LinearProblem(row, row, row, gk=row)
        plan = _plan(problem, GLAttentionConfig(block_q=ROWS))
        return -(-tokens // (plan.rows * plan.chunks))

    def received(self) -> int:
        """Bytes that a device receives: of gathered arrays all but its own part, of permuted ones all."""
        total = 0
        for sizes, operation in re.findall(r"= f32\[([\d,]*)\]\S* (all-gather|collective-permute)\(", self.text()):
            size = 4 * math.prod(int(n) for n in sizes.split(","))
            total += size * (self.devices - 1) // self.devices if operation == "all-gather" else size
        return total

    def formula(self) -> int:
        """What `received` should be: every other shard's summary and adjoint state, or one of each per step and one more."""
        n = self.devices
        times = n - 1 if self.exchange == "gather" or n == 1 else (n - 1).bit_length() + 1
        state = state_bytes(self.heads, self.channels, self.channels)
        summary = summary_bytes(self.gates, self.heads, self.channels, self.channels)
        return times * (summary + (state if self.gradient else 0))


@functools.cache
def _text(program: SplitProgram) -> str:
    return str(program.compiled().as_text())


def state_bytes(heads: int, K: int, V: int) -> int:
    """An adjoint state, which the backward pass sends."""
    return 4 * heads * K * V


def summary_bytes(gates: Gates, heads: int, K: int, V: int) -> int:
    """A shard's summary, which the forward pass sends: U, and decays of rows and columns, or the delta rule's matrix."""
    return state_bytes(heads, K, V) + 4 * heads * {"head": 2, "channel": K + 1}.get(gates, K * K)
