"""What a route is on TPUs: one way to compute a call of a recurrence, forward and backward."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp

from ejkernel._varying import vary, varying_axes
from ejkernel.kernels._pallas.linear._chunks import Chunks
from ejkernel.kernels._pallas.linear._plan import Blocks, Plan
from ejkernel.kernels._pallas.linear.kernels import decode_step
from ejkernel.kernels._pallas.linear.kernels.scan import Adjoints, Tokens

Array = jax.Array
Arrays = dict[str, Array]


class Given(NamedTuple):
    """A call's arrays, by the names of a problem's `differentiable`; under a mesh, those of one device."""

    arrays: Arrays
    cu_seqlens: Array | None

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """(B, T, H, K, V); H: the heads of the states. Queries have as many, or values, as the operation groups them."""
        (B, T, of_queries, K), (of_values, V) = self.arrays["query"].shape, self.arrays["value"].shape[2:]
        return B, T, max(of_queries, of_values), K, V

    def initial(self) -> Array:
        """`[N, H, K, V]` float32."""
        if "initial_state" in self.arrays:
            return self.arrays["initial_state"].astype(jnp.float32)
        B, _, H, K, V = self.sizes
        zeros = jnp.zeros((B if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1, H, K, V), jnp.float32)
        return vary(zeros, varying_axes(*self.arrays.values()))

    def of_sequences(self, found: Array, else_: Array) -> Array:
        """`found [N, ...]` for sequences that have tokens: no chunk goes through an empty one, which gets `else_`."""
        if self.cu_seqlens is None:
            return found
        return jnp.where((jnp.diff(self.cu_seqlens) > 0)[:, None, None, None], found, else_)


@dataclasses.dataclass(frozen=True)
class Route:
    """One way to compute a call. Static data: equal routes compile once."""

    plan: Plan
    title: ClassVar[str]
    covers: ClassVar[str]  # the calls that take it, for readers
    kept: ClassVar[tuple[str, ...]] = ()  # what `forward` keeps for the gradient, by name

    @property
    def name(self) -> str:
        """What `report()` shows."""
        return self.title

    def forward(self, given: Given, keep: bool) -> tuple[Array, Array, Arrays]:
        """(output [B, T, H, V], final state [N, H, K, V], what `backward` starts from if it is to be kept)."""
        raise NotImplementedError

    def backward(self, given: Given, saved: Arrays, doutput: Array, dfinal: Array) -> Arrays:
        """The gradient of every array of the call, in its own shape and dtype."""
        raise NotImplementedError


class Chunked(Route):
    """A scan over chunks. A family says how its arrays lie in chunks (`prepare`) and what a route computes with them."""

    kept = ("starts",)

    def prepare(self, tokens: Tokens, arrays: Arrays) -> Any:
        """What the kernels take beside queries, keys and values."""
        raise NotImplementedError

    def scan(self, tokens: Tokens, gates: Any, initial: Array, keep: bool) -> tuple[Array, Array, Array | None]:
        """(output as the blocks lie, final states, the state before each chunk if they are kept)."""
        raise NotImplementedError

    def scan_back(self, tokens: Tokens, gates: Any, given: Adjoints) -> Arrays:
        """`dq`, `dk`, `dv` as the blocks lie, `dinitial`, and what `gradients` needs."""
        raise NotImplementedError

    def gradients(self, tokens: Tokens, gates: Any, made: Arrays) -> Arrays:
        """Those of the other arrays, `[B, T, H, ...]`."""
        raise NotImplementedError

    def forward(self, given: Given, keep: bool) -> tuple[Array, Array, Arrays]:
        tokens, initial = self._tokens(given), given.initial()
        output, final, starts = self.scan(tokens, self.prepare(tokens, given.arrays), initial, keep)
        output = tokens.chunks.taken(tokens.blocks.restored(output, tokens.blocks.V))
        return output, given.of_sequences(final, initial), {} if starts is None else {"starts": starts}

    def backward(self, given: Given, saved: Arrays, doutput: Array, dfinal: Array) -> Arrays:
        arrays, tokens = given.arrays, self._tokens(given, backwards=True)
        blocks, chunks, gates = tokens.blocks, tokens.chunks, self.prepare(tokens, given.arrays)
        starts = saved["starts"] if "starts" in saved else given.initial()[:, None]
        # A gradient that is summed over a group of heads is rounded after the sum, not before.
        rounded = lambda name: arrays[name].dtype if arrays[name].shape[2] == blocks.heads else jnp.dtype(jnp.float32)
        dtypes = rounded("query"), rounded("key"), rounded("value")
        dfinal = dfinal.astype(jnp.float32)
        made = self.scan_back(tokens, gates, Adjoints(starts, blocks.arranged(chunks.filled(doutput)), dfinal, dtypes))
        grads = {"query": made["dq"], "key": made["dk"], "value": made["dv"]}
        grads = {name: chunks.taken(blocks.restored(grad, arrays[name].shape[-1])) for name, grad in grads.items()}
        grads["initial_state"] = given.of_sequences(made["dinitial"], dfinal)
        grads |= self.gradients(tokens, gates, made)
        return {name: _reduced(grads[name], x) for name, x in arrays.items()}

    def _tokens(self, given: Given, backwards: bool = False) -> Tokens:
        (B, T, H, K, V), arrays = given.sizes, given.arrays
        chunks = Chunks.of(self.plan.rows, B, T, self.plan.reverse, given.cu_seqlens)
        grouped = (arrays[name].shape[2] for name in ("query", "key", "value", "gk", "gv") if name in arrays)
        groups = tuple(dict.fromkeys(H // heads for heads in grouped))
        return Tokens.of(Blocks(self.plan, B, chunks.count, H, K, V, groups, backwards), chunks, arrays)


@dataclasses.dataclass(frozen=True)
class Stepwise(Route):
    """Token by token: every state is read and written once. The gradient is that of the call in one chunk."""

    chunked: Route
    kernel: ClassVar[str]

    @property
    def name(self) -> str:
        return f"{self.title} (gradient: {self.chunked.name})"

    @staticmethod
    def write(S: Array, token: decode_step.Token) -> Array:
        """What a token writes `[1, V]`, from the decayed state `[K, V]`."""
        raise NotImplementedError

    def forward(self, given: Given, keep: bool) -> tuple[Array, Array, Arrays]:
        return *decode_step.forward(self.kernel, self.plan, given.arrays, given.initial(), self.write), {}

    def backward(self, given: Given, saved: Arrays, doutput: Array, dfinal: Array) -> Arrays:
        return self.chunked.backward(given, saved, doutput, dfinal)


def _reduced(grad: Array, x: Array) -> Array:
    """A gradient per head of the states as its input's: summed over the heads of a group, in the input's dtype."""
    if grad.shape != x.shape:
        B, T, h = x.shape[:3]
        grad = jnp.sum(grad.reshape(B, T, h, grad.shape[2] // h, *grad.shape[3:]).astype(jnp.float32), 3)
    return grad.astype(x.dtype)
