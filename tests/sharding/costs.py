"""What a sequence costs where time is split over simulated devices: operations, bytes and digits, against the whole call's.

Run as a program it prints what was found as JSON.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ejkernel.testing.compare import relative_rms
from ejkernel.testing.split_programs import Gates, SplitProgram
from tests.sharding.partitions import sent
from tests.sharding.sequences import Case, values_and_gradients

WORK: dict[Gates, float] = {"head": 1.2, "channel": 1.2, "delta": 1.55, "delta-channel": 1.55}  # times an eighth of the whole
TOKENS = 8192  # 1024 in a shard: composing the other shards' maps weighs more than in longer ones
SENT = {
    "one-device": SplitProgram("channel", 256, 1, "steps", channels=16),
    "head-gather": SplitProgram("head", 256, 2, "gather", channels=16),
    "channel-steps": SplitProgram("channel", 256, 16, "steps", channels=16),
    "channel-gather": SplitProgram("channel", 256, 16, "gather", channels=16),
    "delta-gather": SplitProgram("delta", 256, 8, "gather", channels=16),
    "delta-steps": SplitProgram("delta-channel", 256, 5, "steps", channels=16),
}
ERRORS = {
    "head": Case("gla", ("g",), weak=True, tokens=320),
    "channel": Case("recurrent", ("gk", "gv"), weak=True, exchange="steps", tokens=320),
    "bfloat16": Case("gla", ("g4",), weak=True, dtype="bfloat16", tokens=320),
    "delta": Case("delta", ("g",), weak=True, tokens=320),
    "delta-channel": Case("delta", ("g4",), weak=True, exchange="steps", dtype="bfloat16", tokens=320),
}


def work(gates: Gates) -> float:
    """Operations of a shard of 8, forward and backward, against an eighth of the whole."""
    split = SplitProgram(gates, TOKENS, 8, "gather")
    return 8 * split.operations() / dataclasses.replace(split, devices=1, exchange=None).operations()


def received(program: SplitProgram) -> dict[str, Any]:
    """Collectives and bytes at two lengths, and the formula."""
    longer = dataclasses.replace(program, tokens=2 * program.tokens * program.devices)
    program = dataclasses.replace(program, tokens=program.tokens * program.devices)
    counts = [sent(each.text()) for each in (program, longer)]
    return {"bytes": [program.received(), longer.received()], "formula": program.formula(), "collectives": counts}


def errors(case: Case) -> list[float]:
    """The errors of outputs, states and gradients against float64, split, as multiples of the whole call's."""
    arrays, whole = case.arrays(), case.call()
    alone = functools.partial(values_and_gradients, lambda arrays: whole(**arrays))
    with jax.enable_x64(True):
        wide = {name: jnp.asarray(np.asarray(x, np.float64)) for name, x in arrays.items()}
        exact = jax.tree.map(np.asarray, jax.jit(alone)(wide))
    found = jax.jit(alone)(arrays), jax.jit(functools.partial(values_and_gradients, case.split()[0]))(arrays)
    of = lambda got: [
        relative_rms(np.asarray(x, np.float64), y) for x, y in zip(*map(jax.tree.leaves, (got, exact)), strict=True)
    ]
    return [float(split / one) for one, split in zip(*map(of, found), strict=True)]


def constant_decays(draws: int = 24) -> float:
    """The outputs' error, split, as a multiple of the whole call's: the geometric mean over draws of the decays.

    The same rounding repeats at every step, so that one draw says nothing: here they were 0.2 to 2.9 times.
    """
    case = Case("recurrent", ("g_gamma",), tokens=320)
    arrays, whole, run = case.arrays(), case.call(), case.split()[0]
    alone, split = jax.jit(lambda arrays: whole(**arrays)[0]), jax.jit(lambda arrays: run(arrays)[0])
    rng = np.random.default_rng(0)
    found = []
    for _ in range(draws):
        arrays["g_gamma"] = jnp.asarray(-np.abs(rng.normal(size=arrays["g_gamma"].shape)) / 3, jnp.float32)
        with jax.enable_x64(True):
            exact = np.asarray(alone({name: jnp.asarray(np.asarray(x, np.float64)) for name, x in arrays.items()}))
        one, parts = (relative_rms(np.asarray(call(arrays), np.float64), exact) for call in (alone, split))
        found.append(np.log(parts / one))
    return float(np.exp(np.mean(found)))


def main() -> None:
    made = {
        "work": lambda: {gates: work(gates) for gates in WORK},
        "sent": lambda: {name: received(program) for name, program in SENT.items()},
        "errors": lambda: {name: errors(case) for name, case in ERRORS.items()},
        "constant": constant_decays,
    }
    json.dump({name: made[name]() for name in sys.argv[1:] or made}, sys.stdout)


if __name__ == "__main__":
    main()
