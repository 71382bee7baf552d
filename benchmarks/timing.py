"""Timing that several benchmarks share: compiled functions, warmed up, blocked on, best of interleaved rounds."""

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


def interleaved(functions: dict[str, Callable], *arguments: Any, seconds: float = 2.0, rounds: int = 30) -> dict[str, float]:
    """Best time of each function in seconds, measured in turns so that a slow moment hits all of them.

    The best, not the mean: on a shared machine other work only ever adds time.
    """
    compiled = {name: compile_for(function, *arguments) for name, function in functions.items()}
    best = dict.fromkeys(compiled, float("inf"))
    end = time.perf_counter() + seconds * len(compiled)
    for done in range(rounds):
        for name, function in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(function(*arguments))
            best[name] = min(best[name], time.perf_counter() - start)
        if done >= 2 and time.perf_counter() > end:
            break
    return best
