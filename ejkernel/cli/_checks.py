"""One implementation on one shared case against the float64 reference."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ejkernel.cli._operations import Operation
from ejkernel.kernels._implementation import PlatformFunction
from ejkernel.kernels._registry import Registered
from ejkernel.testing.compare import Judged, judge
from ejkernel.testing.record import Case


@dataclasses.dataclass(frozen=True)
class Check:
    """A case for an implementation to run."""

    op: Operation
    entry: Registered
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
        return max((e for e in self.errors.values() if e.is_value is values), key=closeness, default=None)

    @property
    def closeness(self) -> float:
        """The largest error as a share of its limit."""
        return max(map(closeness, self.errors.values()), default=0.0)


def closeness(entry: Judged) -> float:
    """An error as a share of its limit."""
    return entry.error / entry.limit


def dtypes_of(operations: Sequence[Operation]) -> tuple[str, ...]:
    """The dtypes that shared cases of these operations have."""
    return tuple(dict.fromkeys(case.dtype for op in operations for case in op.cases()))


def run_check(check: Check, gradients: bool = True, candidates: bool = False) -> Iterator[Outcome]:
    """The outcome with the implementation's own choice of configuration, or with every candidate of its."""
    try:
        problem = check.case.problem
        reason = check.op.registry.refusal(check.entry, problem)
        if reason is not None:
            yield Outcome(check, "refused", reason)
            return
        configs: list[Any] = [None]
        if candidates and isinstance(check.entry.function, PlatformFunction):
            configs = list(dict.fromkeys(check.entry.function.implementation.candidates(problem)))
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
        got = check.case.evaluate(function) if gradients else check.case.values(function)
        want = _expected(check.case)
        errors = judge(got, {name: want[name] for name in got}, check.case.tolerance)
    except Exception as problem:  # whatever an implementation raises, the other cases still count
        return Outcome(check, "failed", _text(problem), config=label)
    wrong = [f"{name} {entry.error:.1e} > {entry.limit:.0e}" for name, entry in errors.items() if not entry.right]
    return Outcome(check, "failed" if wrong else "passed", ", ".join(wrong), errors, label)


@functools.cache  # operations share cases
def _expected(case: Case) -> Mapping[str, np.ndarray]:
    return case.expected()


def _text(problem: Exception) -> str:
    first = next((line for line in str(problem).splitlines() if line.strip()), "")
    return f"{type(problem).__name__}: {first}"[:300]
