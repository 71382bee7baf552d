"""Timing that several benchmarks share: compiled functions, warmed up, blocked on, best of several."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax


def compile_for(function: Callable, *arguments: Any) -> Callable:
    """The jitted function, compiled and run once."""
    jitted = jax.jit(function)
    jax.block_until_ready(jitted(*arguments))
    return jitted


def best_times(functions: dict[str, Callable], *arguments: Any, seconds: float = 2.0, rounds: int = 30) -> dict[str, float]:
    """Best time of each function in seconds, each measured in a block of its own calls.

    The best, not the mean: on a shared machine other work only ever adds time. Not in turns: a function that frees gigabytes
    makes whichever runs next pay for getting its memory back from the system.
    """
    best = {}
    for name, function in functions.items():
        compiled = compile_for(function, *arguments)
        times, end = [], time.perf_counter() + seconds
        while len(times) < 3 or (len(times) < rounds and time.perf_counter() < end):
            start = time.perf_counter()
            jax.block_until_ready(compiled(*arguments))
            times.append(time.perf_counter() - start)
        best[name] = min(times)
    return best
