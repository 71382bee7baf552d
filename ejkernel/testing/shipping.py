"""Tuning the calls whose winners come with the package, and writing the winners as it ships them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import jax

from ejkernel.kernels._linear import LinearProblem
from ejkernel.kernels._linear.config import RecurrenceConfig
from ejkernel.kernels._linear.gates import ARGUMENTS
from ejkernel.kernels._linear.operations import recurrent
from ejkernel.modules import GatedDeltaRule, GLAttention, LightningAttention, RecurrentAttention
from ejkernel.ops import ConfigCache, Invocation, Tuner
from ejkernel.ops.config import shipped
from ejkernel.ops.config.codec import from_fields, to_fields

Arrays = dict[str, Any]


class TritonRecurrent(RecurrentAttention):
    """`recurrent_attention` with the triton platform's candidates alone: the others are known to be slower at these sizes."""

    def candidate_cfgs(self, inv: Invocation) -> Iterable[RecurrenceConfig]:
        return [cfg for cfg in super().candidate_cfgs(inv) if cfg.platform == "triton"]


class TritonDeltaRule(GatedDeltaRule):
    """`gated_delta_rule` likewise."""

    def candidate_cfgs(self, inv: Invocation) -> Iterable[RecurrenceConfig]:
        return [cfg for cfg in super().candidate_cfgs(inv) if cfg.platform == "triton"]


def problem_of(arrays: Arrays) -> LinearProblem:
    """The problem of a call of `recurrent_attention`, from arrays by name, as shapes."""
    return jax.eval_shape(lambda arrays: recurrent(**arrays), arrays)


def invocations(arrays: Arrays) -> list[Invocation]:
    """The call as `recurrent_attention` makes it, then as the operations that are special cases of it do."""
    found: list[Invocation] = [Invocation.of(TritonRecurrent(), **arrays)]
    gates = arrays.keys() & set(ARGUMENTS)
    if "gv" not in gates and not {"g", "gk"} <= gates:
        found.append(Invocation.of(GLAttention(), **{"g" if name == "gk" else name: x for name, x in arrays.items()}))
    if gates == {"g_gamma"}:
        rest = {name: x for name, x in arrays.items() if name != "g_gamma"}
        found.append(Invocation.of(LightningAttention(), **rest, layer_idx=0, num_layers=1))
    return found


def delta_invocations(arrays: Arrays) -> list[Invocation]:
    """The call as `gated_delta_rule` makes it."""
    return [Invocation.of(TritonDeltaRule(), **arrays)]


def tune_call(call: Sequence[Invocation], tuner: Tuner, forward_only: bool, cache: ConfigCache) -> dict[str, Any]:
    """Races the candidates of a call's first invocation, stores the winner for all of them, and gives the record.

    Where the time ended before all were timed, they race again with twice the time, and once more with four times.
    """
    first, *others = call
    tuned = tuner.tune(first, validate_backward=not forward_only)
    for times in (2, 4):
        if not tuned.complete:
            patient = copy.copy(tuner)
            patient.max_seconds, patient.candidate_seconds = times * tuner.max_seconds, times * tuner.candidate_seconds
            tuned = patient.tune(first, validate_backward=not forward_only)
    cache.put(first.key, tuned.config, tuned.record)
    for inv in others:
        assert inv.kernel._config_cls is not None
        config = from_fields(inv.kernel._config_cls, to_fields(tuned.config))
        summary = {name: value for name, value in tuned.record.items() if name != "candidates"}
        cache.put(inv.key, config, {**summary, "measured_as": first.kernel.op_id})
    return {"config": tuned.config, **tuned.record}


def write(file: Path, kind: str, cache: ConfigCache) -> None:
    """Adds what a cache holds to the file of a kind of device; calls that the file has already are replaced."""
    shipped.write(file, kind, cache.entries())
