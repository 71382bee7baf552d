"""One tuning: the candidates of a call run against each other."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import jax
from jax import tree_util

from ejkernel.ops.compare import difference, nan_in
from ejkernel.ops.config.codec import check_config, to_fields, unfit
from ejkernel.ops.invocation import Invocation, is_array
from ejkernel.ops.trial import Inputs, Trial
from ejkernel.ops.tuner import OUT_OF_TIME, Tuned, Tuner, TuningFailed
from ejkernel.ops.worker import OvertimeError, Worker

_COMPILING_SHARE = 0.75  # of the time; the rest is for measuring what compiled
_ENOUGH_ROUNDS = 5  # won by chance once in 32 times between equals
_HOPELESS = 2.0  # times the best: not measured further after three rounds


class Race:
    """The state of one tuning; see `Tuner` for what it does."""

    def __init__(self, tuner: Tuner, inv: Invocation[Any, Any], backward: bool):
        self.tuner, self.inv, self.backward = tuner, inv, backward
        self.start = time.monotonic()
        self.worker = Worker(inv.device)
        self.bar = _Bar(inv.kernel.op_id)
        self.show = self.bar.show if tuner.progress is None else tuner.progress
        self.trials: list[Trial] = []
        self.expected: Any = None
        self.backward_note: str | None = None

    def close(self) -> None:
        """Ends the thread and clears the terminal's line."""
        self.worker.close()
        self.bar.close()

    def run(self) -> Tuned:
        """The winner. TuningFailed when not even the heuristic could be measured."""
        heuristic = self._prepare()
        for number, trial in enumerate(self.trials):
            self.show(0.5 * number / len(self.trials), f"compiling {number + 1}/{len(self.trials)}")
            self._qualify(trial)
            if trial is heuristic and trial.reason is not None:
                raise self._failure(f"the heuristic {trial.config}: {trial.reason}")
        self.expected = None  # frees the device's memory for the measurements
        self._measure([trial for trial in self.trials if trial.reason is None])
        if heuristic.reason is not None:
            raise self._failure(f"the heuristic {heuristic.config}: {heuristic.reason}")
        winner = self._winner(heuristic)
        return Tuned(winner.config, self._record(winner, heuristic))

    def _prepare(self) -> Trial:
        """Makes the arguments and the list of trials, the heuristic first."""

        def prepare() -> tuple[Any, list[Any], Inputs]:
            heuristic = self.inv.kernel.heuristic_cfg(self.inv)
            to_fields(heuristic)  # TypeError, before anything is measured, for what could not be stored
            others = [config for config in self.inv.kernel.candidate_cfgs(self.inv) if config != heuristic]
            fit = list(dict.fromkeys(config for config in others if unfit(config) is None))
            return heuristic, fit + [config for config in others if unfit(config) is not None], Inputs.of(self.inv)

        try:
            heuristic, others, self.inputs = self.worker.call(prepare, self._left())
        except OvertimeError as late:
            raise self._failure(f"making the arguments: {late}") from None
        except Exception as problem:
            raise self._failure(f"making the arguments: {_reason(problem)}") from problem
        if self.backward:
            self._add_gradients(heuristic)
        self.trials = [Trial(config) for config in (heuristic, *others)]
        return self.trials[0]

    def _add_gradients(self, heuristic: Any) -> None:
        def add() -> Inputs:
            if not self.inv.kernel.differentiable(self.inv):
                return self.inputs
            inputs = self.inputs.with_cotangents(heuristic)
            jax.eval_shape(inputs.runner(heuristic))  # whether it can be differentiated at all, without compiling
            return inputs

        try:
            self.inputs = self.worker.call(add, self._left())
        except Exception as problem:
            self.backward_note = f"gradients were not measured: {_reason(problem)}"

    def _qualify(self, trial: Trial) -> None:
        """Compiles and runs a trial once and compares what it computes with the heuristic's."""
        is_reference = trial is self.trials[0]
        share = self.tuner.max_seconds * (1.0 if is_reference else _COMPILING_SHARE)
        left = self.start + share - time.monotonic()
        if left <= 0:
            trial.reason = f"not tried: the time of {self.tuner.max_seconds:g} s {OUT_OF_TIME}"
            return
        limit = left if is_reference else min(left, self.tuner.candidate_seconds)
        trial.reason = self._attempt(lambda: self._first(trial, is_reference), limit)

    def _first(self, trial: Trial, is_reference: bool) -> str | None:
        kernel = self.inv.kernel
        check_config(trial.config, "a candidate")
        to_fields(trial.config)
        refusal = kernel.check_cfg(self.inv, trial.config)
        if refusal is not None:
            return f"not supported: {refusal}"
        found = trial.first(self.inputs, self.tuner.warmup)
        if is_reference:
            self.expected = found
            return "its result or gradient is NaN on the random arguments" if nan_in(found) else None
        reasons = (
            difference(kernel, self.inputs.arrays, expected, result, what)
            for expected, result, what in zip(self.expected, found, ("result", "gradient"), strict=True)
        )
        return next(filter(None, reasons), None)

    def _attempt(self, task: Callable[[], str | None], seconds: float) -> str | None:
        try:
            return self.worker.call(task, seconds)
        except OvertimeError as late:
            return f"over time: {late}"
        except Exception as problem:
            return _reason(problem)

    def _measure(self, trials: list[Trial]) -> None:
        for number in range(self.tuner.iters):
            racing = [trial for trial in trials if trial.reason is None]
            if number >= 3:
                best = min(trial.seconds for trial in racing)
                racing = [trial for trial in racing if trial is trials[0] or trial.seconds <= _HOPELESS * best]
            if len(racing) == 1 and number >= 3:
                return
            self.show(0.5 + 0.5 * number / self.tuner.iters, f"measuring {len(racing)} candidates")
            for trial in racing if number % 2 == 0 else reversed(racing):
                if self._left() <= 0:
                    break
                trial.reason = self._attempt(trial.sample, min(self.tuner.candidate_seconds, self._left()))
        for trial in trials:
            if trial.reason is None and not trial.samples:
                trial.reason = f"not timed: the time of {self.tuner.max_seconds:g} s {OUT_OF_TIME}"

    def _winner(self, heuristic: Trial) -> Trial:
        best = min((trial for trial in self.trials if trial.reason is None), key=lambda trial: trial.seconds)
        gain = 1 - best.seconds / heuristic.seconds
        noise = 2 * (best.noise**2 + heuristic.noise**2) ** 0.5
        # On a busy machine times scatter widely, but whoever is faster in every single round is faster.
        rounds = list(zip(best.samples, heuristic.samples, strict=False))
        steady = len(rounds) >= _ENOUGH_ROUNDS and all(mine < its for mine, its in rounds)
        return best if gain > self.tuner.min_gain and (gain > noise or steady) else heuristic

    def _left(self) -> float:
        return self.start + self.tuner.max_seconds - time.monotonic()

    def _record(self, winner: Trial, heuristic: Trial) -> dict[str, Any]:
        route = self.inv.kernel.route(self.inv, winner.config)
        return {
            **({} if route is None else {"route": route}),
            "seconds": winner.seconds,
            "heuristic_seconds": heuristic.seconds,
            "heuristic": to_fields(heuristic.config),
            "measured": "forward" if self.inputs.cotangents is None else "forward+backward",
            **({"note": self.backward_note} if self.backward_note else {}),
            **self._circumstances(),
        }

    def _circumstances(self) -> dict[str, Any]:
        return {
            "candidates": [trial.as_record() for trial in self.trials],
            "shapes": {name: str(leaf.shape) for name, leaf in self._actual_shapes().items()},
            "tuning_seconds": round(time.monotonic() - self.start, 3),
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "environment": self.inv.environment,
        }

    def _actual_shapes(self) -> dict[str, Any]:
        leaves = tree_util.tree_flatten_with_path(self.inv.arguments)[0]
        return {tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves if is_array(leaf)}

    def _failure(self, why: str) -> TuningFailed:
        for trial in self.trials:
            if trial.reason is None and not trial.samples:
                trial.reason = "not tried: the heuristic failed"
        return TuningFailed(why, {"failed": why, **self._circumstances()})


def _reason(problem: Exception) -> str:
    text = next((line for line in str(problem).splitlines() if line.strip()), "")[:300]
    memory = "RESOURCE_EXHAUSTED" in text or isinstance(problem, MemoryError) or "out of memory" in text.lower()
    return f"{'out of memory' if memory else 'failed'}: {type(problem).__name__}: {text}"


class _Bar:
    """A bar on the terminal, if standard error is one."""

    def __init__(self, op_id: str):
        self._op_id, self._shown = op_id, False
        self._stream = sys.stderr if sys.stderr is not None and sys.stderr.isatty() else None

    def show(self, share: float, what: str) -> None:
        if self._stream is not None:
            self._shown = True
            done = int(20 * share)
            self._stream.write(f"\r\x1b[Ktuning {self._op_id} [{'#' * done}{'.' * (20 - done)}] {what}")
            self._stream.flush()

    def close(self) -> None:
        if self._stream is not None and self._shown:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
