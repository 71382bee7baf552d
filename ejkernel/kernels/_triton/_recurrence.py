"""A recurrence on Triton as the rest of the library sees it: what every family of them takes, refuses, chooses and computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import ClassVar, TypeVar

import jax
import jax.numpy as jnp

from ejkernel.callib import shared_memory_of
from ejkernel.kernels._implementation import Implementation
from ejkernel.kernels._linear.config import TILE_FIELDS, RecurrenceConfig
from ejkernel.kernels._linear.problem import DECODED_TOKENS, EMPTY
from ejkernel.kernels._triton.linear._chunks import Array
from ejkernel.kernels._triton.linear._launches import does_not_fit
from ejkernel.kernels._triton.linear._plan import LEAST_CAPABILITY, Problem, capability_of, interpreted
from ejkernel.kernels._triton.linear._solve import solve_along
from ejkernel.kernels._triton.linear.routes import Route

P = TypeVar("P", bound=Problem)
C = TypeVar("C", bound=RecurrenceConfig)

MAX_STEPS = DECODED_TOKENS  # tokens up to which one launch, step by step, beats chunks
MOST = 12  # candidates of a call, the heuristic included
ROOM_FOR_CANDIDATES = shared_memory_of(80)  # bytes: an A100's, which has room for every tile that `changes` names


class TritonRecurrence(Implementation[P, C]):
    """A recurrence on NVIDIA GPUs from compute capability 8.0, along one of its routes."""

    max_channels: ClassVar[int]
    rows: ClassVar[tuple[int, ...]]  # legal block_q

    def taken(self, problem: P, cfg: C) -> Route:
        """The route of a call."""
        raise NotImplementedError

    def supports(self, problem: P) -> str | None:
        """Why the kernels cannot take a call; None when they can."""
        leaves = jax.tree.leaves(problem)
        if not all(isinstance(n, int) for x in leaves for n in x.shape):
            return "Triton kernels are compiled for sizes, and some of this call's are symbolic: platform='xla' takes those"
        capability = capability_of(problem)
        if capability is None or capability < LEAST_CAPABILITY:
            least = f"{LEAST_CAPABILITY / 10}"
            has = "is none" if capability is None else f"has {capability / 10}"
            return f"Triton kernels need an NVIDIA GPU of compute capability {least} or newer; {problem.device} {has}"
        if any(x.dtype == jnp.float64 for x in leaves):
            return "Triton kernels sum in float32; float64 is for platform='xla'"
        _, _, _, K, V = problem.shape
        if max(K, V) > self.max_channels:
            return f"key and value channels go up to {self.max_channels}; got {K} and {V}"
        return None

    def refuses(self, problem: P, cfg: C) -> str | None:
        """Why the kernels do not run with a configuration: a field that they cannot follow, or that nothing would read.

        Tiles that no candidate names are compiled to see whether they fit; a call compiles them no second time.
        """
        if cfg.block_q not in self.rows:
            return f"block_q must be one of {', '.join(map(str, self.rows))} on triton; got {cfg.block_q}"
        if cfg.block_h is not None:
            return f"block_h must be None on triton, where a program takes one head; got {cfg.block_h}"
        route = self.taken(problem, cfg)
        reason = route.refuses(cfg)
        capability = problem.device.capability
        if reason is None and capability is not None and not interpreted() and not _known_to_fit(route, cfg):
            reason = does_not_fit(route, problem, capability)
        return reason

    def candidates(self, problem: P) -> Sequence[C]:
        """The heuristic first, then at most `MOST` - 1 others; none that is refused or whose tiles exceed the channels.

        They differ from the heuristic in one or two fields each and fit an A100's and an H100's shared memory. On a device with
        less, such as an RTX card, each is compiled to see whether it fits.
        """
        first = self.heuristic(problem)
        _, T, _, K, V = problem.shape
        sizes = {"block_k": K, "block_d": V}
        small = lambda change: all(change.get(n, 16) <= max(16, 1 << (size - 1).bit_length()) for n, size in sizes.items())
        changes = self.taken(problem, first).changes()
        found = [first, *(dataclasses.replace(first, **change) for change in changes if small(change))]
        if MAX_STEPS < T <= 4 * MAX_STEPS:
            found.append(dataclasses.replace(first, schedule="recurrent"))
        legal = [cfg for cfg in dict.fromkeys(found) if cfg is first or self.refuses(problem, cfg) is None]
        return legal[:MOST]

    def route(self, problem: P, cfg: C) -> str:
        return EMPTY if problem.empty else self.taken(problem, cfg).name

    def solve(self, problem: P, cfg: C) -> tuple[Array, Array]:
        """(output in `problem.output_dtype`, final state)."""
        if problem.empty:
            return problem.of_no_tokens()
        return solve_along(self.taken(problem, cfg), problem.differentiable, problem.cu_seqlens)

    def versions(self) -> Mapping[str, str]:
        import triton

        return {"triton": triton.__version__}


def _known_to_fit(route: Route, cfg: RecurrenceConfig) -> bool:
    """Whether a configuration names no tiles, or, on a device with an A100's shared memory or more, those of a candidate."""
    named = {name: getattr(cfg, name) for name in TILE_FIELDS if getattr(cfg, name) is not None}
    offered = [{name: value for name, value in change.items() if name in TILE_FIELDS} for change in route.changes()]
    return not named or (route.plan.shared >= ROOM_FOR_CANDIDATES and named in offered)
