"""Which way a call of the linear operations is computed on TPUs: decided here, once. `docs/routes.md` has the table."""

from __future__ import annotations

from typing import ClassVar

import jax

from ejkernel.kernels._linear import LinearConfig, LinearProblem
from ejkernel.kernels._pallas._chips import Chip
from ejkernel.kernels._pallas.linear._gates import Gates
from ejkernel.kernels._pallas.linear._plan import Plan
from ejkernel.kernels._pallas.linear._route import Arrays, Chunked, Stepwise
from ejkernel.kernels._pallas.linear.kernels import channel_gates, head_gate
from ejkernel.kernels._pallas.linear.kernels.decode_step import Token
from ejkernel.kernels._pallas.linear.kernels.scan import Adjoints, Tokens

Array = jax.Array


class LinearRoute(Chunked):
    """What the routes by chunks differ in, beside what they compute.

    Attributes:
        longest: rows of the longest chunk.
        tiles: (rows, heads of a block) that are worth measuring.
    """

    longest: ClassVar[int]
    tiles: ClassVar[tuple[tuple[int, int], ...]]

    @staticmethod
    def usual(chip: Chip) -> int:
        """Rows of a chunk that the heuristic takes where they fit."""
        raise NotImplementedError

    def prepare(self, tokens: Tokens, arrays: Arrays) -> Gates:
        return Gates.of(tokens.chunks, arrays)

    def gradients(self, tokens: Tokens, gates: Gates, made: Arrays) -> Arrays:
        return gates.gradients(tokens.blocks, made)


class HeadGate(LinearRoute):
    title = "head gate"
    covers = "`g`, `g_gamma` or no gate"
    longest, tiles = 512, ((128, 4), (256, 2), (512, 2))

    @staticmethod
    def usual(chip: Chip) -> int:
        return 256

    def scan(self, tokens: Tokens, gates: Gates, initial: Array, keep: bool) -> tuple[Array, Array, Array | None]:
        return head_gate.forward(tokens, gates.decays(tokens.blocks), initial, keep)

    def scan_back(self, tokens: Tokens, gates: Gates, given: Adjoints) -> Arrays:
        return head_gate.backward(tokens, gates.decays(tokens.blocks), given)


class ChannelGates(LinearRoute):
    title = "channel gates"
    covers = "`gk`, `gv`, any of the others beside them"
    longest, tiles = 256, ((128, 2), (128, 4), (128, 8), (256, 4))

    @staticmethod
    def usual(chip: Chip) -> int:
        """The matrix unit's width: a level of the tree is one product of all rows."""
        return chip.mxu

    def scan(self, tokens: Tokens, gates: Gates, initial: Array, keep: bool) -> tuple[Array, Array, Array | None]:
        return channel_gates.forward(tokens, gates.channels(tokens.blocks), initial, keep)

    def scan_back(self, tokens: Tokens, gates: Gates, given: Adjoints) -> Arrays:
        return channel_gates.backward(tokens, gates.channels(tokens.blocks), given)


class DecodeStep(Stepwise):
    title = "decode step"
    covers = "schedule='recurrent', the heuristic up to 16 tokens; any gates, not packed"
    kernel = "decode_step"

    @staticmethod
    def write(S: Array, token: Token) -> Array:
        return token.row["value"]


ROUTES = (DecodeStep, HeadGate, ChannelGates)


def chunked_route(problem: LinearProblem) -> type[LinearRoute]:
    """The route of a call by chunks, and of every call's gradient."""
    return HeadGate if problem.gk is None and problem.gv is None else ChannelGates


def route_of(problem: LinearProblem, cfg: LinearConfig, plan: Plan) -> LinearRoute | DecodeStep:
    """The route of a call."""
    chunked = chunked_route(problem)(plan)
    return DecodeStep(plan, chunked) if cfg.schedule == "recurrent" else chunked
