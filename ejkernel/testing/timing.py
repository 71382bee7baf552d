"""Timing: compiled functions, warmed up, waited for, the best of several samples."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

DIRECTIONS = ("forward", "forward+backward")
_SHORTEST_SAMPLE = 1e-3  # seconds; calls shorter than this are timed several in a row
_MOST_CALLS = 64  # in a row


def directed(function: Callable[..., Any], direction: str) -> Callable[[dict[str, Any], Any], Any]:
    """The function of (arrays by name, cotangent of the output) that is timed.

    Args:
        function: takes the arrays by name and gives the output.
        direction: "forward" gives the output; "forward+backward" the output and the gradient of every array.
    """
    if direction not in DIRECTIONS:
        raise ValueError(f"direction must be one of {', '.join(map(repr, DIRECTIONS))}; got {direction!r}.")
    if direction == "forward":
        return lambda arrays, cotangent: function(**arrays)

    def both(arrays: dict[str, Any], cotangent: Any) -> tuple[Any, dict[str, Any]]:
        output, pull = jax.vjp(lambda arrays: function(**arrays), arrays)
        return output, pull(cotangent)[0]

    return both


def compile_for(function: Callable[..., Any], *arguments: Any) -> Callable[..., Any]:
    """The jitted function, compiled and run once."""
    jitted = jax.jit(function)
    jax.block_until_ready(jitted(*arguments))
    return jitted


def best_time(
    call: Callable[[], Any], wait: Callable[[Any], Any] = jax.block_until_ready, *, seconds: float = 2.0, rounds: int = 30
) -> float:
    """Seconds of one call that was made before: the best of up to `rounds` samples within about `seconds`.

    At least three samples, two of calls that take longer than all of `seconds`.

    The best, not the mean: on a shared machine other work only ever adds time. Short calls are made several in a row, so
    that the time of an accelerator's kernel counts and not that of waiting for it.

    Args:
        call: starts the work and gives something to wait for.
        wait: returns when the work is done.
    """
    start = time.perf_counter()
    wait(call())
    once = max(time.perf_counter() - start, 1e-7)
    calls = min(_MOST_CALLS, max(1, math.ceil(_SHORTEST_SAMPLE / once)))
    samples, least = ([once], 2) if once > seconds else ([], 3)
    end = start + seconds
    while len(samples) < least or (len(samples) < rounds and time.perf_counter() < end):
        start = time.perf_counter()
        for _ in range(calls):
            result = call()
        wait(result)
        samples.append((time.perf_counter() - start) / calls)
    return min(samples)


def best_times(
    functions: Mapping[str, Callable[..., Any]], *arguments: Any, seconds: float = 2.0, rounds: int = 30
) -> dict[str, float]:
    """Best time of each function in seconds, each measured in a block of its own calls.

    Not in turns: a function that frees gigabytes makes whichever runs next pay for getting its memory back from the system.
    """
    best: dict[str, float] = {}
    for name, function in functions.items():
        compiled = compile_for(function, *arguments)
        best[name] = best_time(lambda: compiled(*arguments), seconds=seconds, rounds=rounds)  # noqa: B023 (used at once)
    return best
