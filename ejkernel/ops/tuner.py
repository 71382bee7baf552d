"""`Tuner`: measures a kernel's candidate configurations for one call and picks the fastest that is right."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ejkernel._numbers import is_int
from ejkernel.ops.invocation import Invocation

OUT_OF_TIME = "was used up"  # in the reason of a candidate that was not reached


class TuningFailed(Exception):
    """No candidate could be measured, not even the heuristic; `record` says why each failed."""

    def __init__(self, message: str, record: Mapping[str, Any]):
        super().__init__(message)
        self.record = record


@dataclass(frozen=True)
class Tuned:
    """The configuration that won and the record of the race."""

    config: Any
    record: Mapping[str, Any]

    @property
    def decided(self) -> bool:
        """Whether there was a race: something beside the heuristic was timed, or nothing was left out for want of time."""
        timed = sum("seconds" in candidate for candidate in self.record.get("candidates", ()))
        return timed != 1 or self.complete

    @property
    def complete(self) -> bool:
        """Whether no candidate was left out for want of time."""
        return not any(OUT_OF_TIME in candidate.get("reason", "") for candidate in self.record.get("candidates", ()))


class Tuner:
    """Measures candidates on random arguments of a call's shapes and dtypes.

    Every candidate is compiled, run, compared with the heuristic's result (and gradients), and timed in rounds: one sample of
    each candidate per round, in alternating order, so that a machine that slows down slows all of them. The median counts.
    The heuristic stays unless another is faster by `min_gain` and by more than the noise, or in every round. A candidate that
    fails, runs out of memory or time, or computes something else is rejected with its reason.

    All of it happens in a thread of its own on concrete arrays: a caller that is tracing is not disturbed. A candidate that
    hangs cannot be stopped inside the process; its thread is left behind, and may slow down what runs after it.
    """

    def __init__(
        self,
        warmup: int = 2,
        iters: int = 10,
        *,
        max_seconds: float = 60.0,
        candidate_seconds: float = 20.0,
        min_gain: float = 0.03,
        progress: Callable[[float, str], None] | None = None,
    ):
        """
        Args:
            warmup: calls of each candidate before any is timed, at least one.
            iters: rounds, that is, samples of each candidate.
            max_seconds: the longest that tuning one call may take; candidates it does not reach are listed as not tried.
            candidate_seconds: the longest that one candidate may take to compile and run.
            min_gain: how much faster than the heuristic a candidate must be, as a share of its time.
            progress: called with the share that is done and what is being done; None: a bar where standard error is a terminal.
        """
        for name, value, least in (("warmup", warmup, 0), ("iters", iters, 1)):
            if not is_int(value) or value < least:
                raise ValueError(f"{name} must be an integer of at least {least}; got {value!r}.")
        for name, seconds in (("max_seconds", max_seconds), ("candidate_seconds", candidate_seconds)):
            if not seconds > 0:
                raise ValueError(f"{name} must be positive; got {seconds!r}.")
        if not 0 <= min_gain < 1:
            raise ValueError(f"min_gain must be in [0, 1); got {min_gain!r}.")
        self.warmup, self.iters = int(warmup), int(iters)
        self.max_seconds, self.candidate_seconds, self.min_gain = max_seconds, candidate_seconds, min_gain
        self.progress = progress

    def tune(self, inv: Invocation[Any, Any], validate_backward: bool = False) -> Tuned:
        """The best configuration for a call.

        Args:
            validate_backward: measure and compare the result together with its gradients.

        Raises:
            TuningFailed: not even the heuristic could be measured.
        """
        from ejkernel.ops.race import Race

        race = Race(self, inv, validate_backward)
        try:
            return race.run()
        finally:
            race.close()
