"""Which way a call of the delta rule is computed on TPUs: decided here, once. `docs/routes.md` has the table."""

from __future__ import annotations

import jax

from ejkernel.kernels._delta import DeltaProblem, GatedDeltaRuleConfig
from ejkernel.kernels._pallas._products import column_sums
from ejkernel.kernels._pallas.gated_delta_rule.kernels import chunks
from ejkernel.kernels._pallas.linear._plan import Plan
from ejkernel.kernels._pallas.linear._route import Arrays, Chunked, Stepwise
from ejkernel.kernels._pallas.linear.kernels.decode_step import Token
from ejkernel.kernels._pallas.linear.kernels.scan import Adjoints, Tokens

Array = jax.Array


class DeltaRoute(Chunked):
    """Chunks of the delta rule: the kernels are the same, and their scores follow the gate."""

    def prepare(self, tokens: Tokens, arrays: Arrays) -> chunks.Call:
        return chunks.Call.of(tokens, arrays)

    def scan(self, tokens: Tokens, gates: chunks.Call, initial: Array, keep: bool) -> tuple[Array, Array, Array | None]:
        return chunks.forward(gates, initial, keep)

    def scan_back(self, tokens: Tokens, gates: chunks.Call, given: Adjoints) -> Arrays:
        return chunks.backward(gates, given)

    def gradients(self, tokens: Tokens, gates: chunks.Call, made: Arrays) -> Arrays:
        found = {name: made[f"d{name}"] for name in ("beta", "g") if f"d{name}" in made}
        if "dgk" in made:
            found["gk"] = tokens.blocks.restored(made["dgk"], tokens.blocks.K)
        return {name: tokens.chunks.taken(x) for name, x in found.items()}


class HeadGate(DeltaRoute):
    title = "delta rule, head gate"
    covers = "g [B, T, H] or no gate"


class KeyGate(DeltaRoute):
    title = "delta rule, key gate"
    covers = "g [B, T, H, K]"


class DecodeStep(Stepwise):
    title = "delta rule, decode step"
    covers = "schedule='recurrent', the heuristic up to 16 tokens; any gate, not packed"
    kernel = "delta_rule_step"

    @staticmethod
    def write(S: Array, token: Token) -> Array:
        """beta times the value less what the state has for the key."""
        return token.row["beta"] * (token.row["value"] - column_sums(token.column["key"] * S))


ROUTES = (DecodeStep, HeadGate, KeyGate)


def route_of(problem: DeltaProblem, cfg: GatedDeltaRuleConfig, plan: Plan) -> DeltaRoute | DecodeStep:
    """The route of a call."""
    chunked = KeyGate(plan) if problem.per_channel else HeadGate(plan)
    return DecodeStep(plan, chunked) if cfg.schedule == "recurrent" else chunked
