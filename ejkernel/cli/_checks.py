"""One implementation on one shared case against the float64 reference."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ejkernel.cli._operations import LAYER, Operation
from ejkernel.kernels._registry import Implementation, kernel_registry
from ejkernel.testing.attention_cases import CASES as ATTENTION_CASES
from ejkernel.testing.attention_cases import AttentionCase
from ejkernel.testing.compare import Judged, judge
from ejkernel.testing.linear_cases import CASES as LINEAR_CASES
from ejkernel.testing.linear_cases import LinearCase
from ejkernel.testing.linear_reference import linear_reference

Case = LinearCase | AttentionCase
_ALL: list[Case] = [*LINEAR_CASES, *ATTENTION_CASES]
DTYPES = tuple(dict.fromkeys(case.dtype for case in _ALL))  # those that shared cases have


@dataclasses.dataclass(frozen=True)
class Check:
    """A case for an implementation to run."""

    op: Operation
    entry: Implementation
    case: Case

    @property
    def group(self) -> tuple[str, str, str]:
        """The row of the table that it belongs to."""
        return self.op.name, str(self.entry.platform), self.case.dtype


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of a check.

    Attributes:
        status: "passed", "refused" or "failed".
        reason: why it was refused or failed.
        errors: every array's error with its limit; empty where nothing was computed.
        config: the configuration it ran with; "" for the implementation's own choice.
    """

    check: Check
    status: str
    reason: str = ""
    errors: dict[str, Judged] = dataclasses.field(default_factory=dict)
    config: str = ""

    def worst(self, values: bool) -> Judged | None:
        """The entry nearest to its limit, of values or of gradients."""
        return max((e for e in self.errors.values() if e.is_value is values), key=lambda e: e.error, default=None)

    @property
    def closeness(self) -> float:
        """The largest error as a share of its limit."""
        return max((entry.error / entry.limit for entry in self.errors.values()), default=0.0)


def cases_of(op: Operation) -> list[Case]:
    """The shared cases that are calls of an operation."""
    if not op.linear:
        return list(ATTENTION_CASES)
    if not op.legal_gates:  # the shared cases without their gates, as far as they still differ
        bare = lambda case: dataclasses.replace(case, gates=(), gate_kind="mild", gates_per_kv_head=False)
        return list({dataclasses.replace(bare(case), name=""): bare(case) for case in reversed(LINEAR_CASES)}.values())[::-1]
    return [case for case in LINEAR_CASES if set(case.gates) <= set(op.legal_gates)]


def run_check(check: Check, gradients: bool = True, candidates: bool = False) -> Iterator[Outcome]:
    """The outcome with the implementation's own choice of configuration, or with every candidate of its."""
    try:
        problem = _problem(check.op, check.case)
        reason = kernel_registry.refusal(check.entry, problem)
        if reason is not None:
            yield Outcome(check, "refused", reason)
            return
        offered = getattr(check.entry.function, "candidates", None) if candidates else None
        configs = [None] if offered is None else list(dict.fromkeys(offered(problem)))
    except Exception as problem_with_it:  # an implementation that cannot even answer has failed the case
        yield Outcome(check, "failed", _text(problem_with_it))
        return
    for config in configs:
        yield _compare(check, config, gradients)


def _compare(check: Check, config: Any, gradients: bool) -> Outcome:
    function: Callable[..., Any] = check.entry.function
    function = function if config is None else functools.partial(function, cfg=config)
    label = "" if config is None else str(config)
    try:
        got = _evaluate(check.op, check.case, function, gradients)
        want = _expected(check.op.op_id == "lightning_attn", check.case)
        errors = judge(got, {name: want[name] for name in got}, check.case.tolerance)
    except Exception as problem:  # whatever an implementation raises, the other cases still count
        return Outcome(check, "failed", _text(problem), config=label)
    wrong = [f"{name} {entry.error:.1e} > {entry.limit:.0e}" for name, entry in errors.items() if not entry.right]
    return Outcome(check, "failed" if wrong else "passed", ", ".join(wrong), errors, label)


def _problem(op: Operation, case: Case) -> Any:
    if isinstance(case, AttentionCase):
        return case.problem
    arrays, options = case.arguments()
    assert op.problem is not None
    return op.problem(**arrays, **options, **op.options)


def _evaluate(op: Operation, case: Case, function: Callable[..., Any], gradients: bool) -> dict[str, Any]:
    if isinstance(case, AttentionCase):
        found = case.value_and_gradients(function)
        return found if gradients else {name: found[name] for name in ("output", "weights")}
    called = functools.partial(function, **op.options)
    return case.evaluate(called) if gradients else case.values(called)


@functools.cache  # operations share cases
def _expected(lightning: bool, case: Case) -> dict[str, np.ndarray]:
    if isinstance(case, AttentionCase) or not lightning:
        return case.expected()
    from ejkernel.kernels._linear.platform_function import lightning_decay

    return case.expected(functools.partial(linear_reference, g_gamma=lightning_decay(case.heads, **LAYER)))


def _text(problem: Exception) -> str:
    first = next((line for line in str(problem).splitlines() if line.strip()), "")
    return f"{type(problem).__name__}: {first}"[:300]
