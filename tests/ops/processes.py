"""One process of a two-process program; run by the tests of promise 10."""

from __future__ import annotations

import json
import sys
import time
import warnings
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax._src.distributed import global_state

from ejkernel.ops import (
    AutotunePolicy,
    ConfigSelectorChain,
    Executor,
    Invocation,
    Kernel,
    NoConfigError,
    PersistentCache,
    Tuner,
    tune,
)
from ejkernel.ops.tuner import Tuned
from tests.ops.racers import Race, Racer


@dataclass(frozen=True)
class Who:
    number: int = -1


class Named(Kernel[Who, jax.Array]):
    """y = the number of the configuration."""

    op_id = "named"

    def run(self, x: jax.Array, *, cfg: Who) -> jax.Array:
        return x * 0 + cfg.number

    def heuristic_cfg(self, inv: Invocation) -> Who:
        return Who()


class Biased(Tuner):
    """Finds its own process's number the fastest, as machines that differ would."""

    def __init__(self, number: int):
        super().__init__(0, 1, max_seconds=5.0)
        self.number, self.tunings = number, 0

    def tune(self, inv: Invocation, validate_backward: bool = False) -> Tuned:
        self.tunings += 1
        return Tuned(Who(self.number), {"seconds": 1.0})


def agree(number: int, folder: str) -> dict:
    tuner = Biased(number)
    chain = ConfigSelectorChain(
        policy=AutotunePolicy(cache_miss_fallback="autotune"), tuner=tuner, persistent=PersistentCache("named", folder)
    )
    executor = Executor(chain)
    choice = executor.choose(Named(), jnp.ones(3))
    found = {"preferred": number, "chosen": choice.config.number, "level": choice.level, "tunings": tuner.tunings}
    found["jitted"] = int(jax.jit(lambda x: executor(Named(), x))(jnp.ones(3))[0])
    found["stored"] = len(list(PersistentCache("named", folder).items()))
    found["ahead"] = [c.config.number for c in tune(jax.jit(lambda x: executor(Named(), x)), jnp.ones(7))]
    guessing = ConfigSelectorChain(policy=AutotunePolicy(cache_miss_fallback="heuristics"), tuner=tuner)
    found["heuristics"] = guessing.choose(Invocation.of(Named(), jnp.ones(9))).level
    return found


def fail(number: int, folder: str) -> dict:
    warnings.simplefilter("always")
    tuner = Tuner(1, 1, max_seconds=1.0, candidate_seconds=0.5)
    chain = ConfigSelectorChain(policy=AutotunePolicy(cache_miss_fallback="autotune"), tuner=tuner)
    chain.patience = 2.0
    found: dict = {}
    choice = chain.choose(Invocation.of(Race(heuristic=Racer(300, "raises")), jnp.ones(5)))
    found["failed tuning"] = [choice.level, choice.config.work]
    if number == 1:  # a call that process 0 never makes
        start = time.monotonic()
        with warnings.catch_warnings(record=True) as given:
            warnings.simplefilter("always")
            choice = chain.choose(Invocation.of(Named(), jnp.ones(11)))
        seconds = time.monotonic() - start
        found["absent"] = {"level": choice.level, "warning": str(given[0].message), "seconds": seconds}
        global_state.client.key_value_set("the other process", "went on")
    else:
        global_state.client.blocking_key_value_get("the other process", 60_000)
        biased = ConfigSelectorChain(policy=AutotunePolicy(cache_miss_fallback="autotune"), tuner=Biased(0))
        late = biased.choose(Invocation.of(Named(), jnp.ones(11)))
        found["late"] = [late.level, late.config.number]
    strict = ConfigSelectorChain(policy=AutotunePolicy(cache_miss_fallback="error"))
    try:
        strict.choose(Invocation.of(Named(), jnp.ones(13)))
    except NoConfigError as refusal:
        found["error"] = f"NoConfigError: {refusal}"
    return found


if __name__ == "__main__":
    scenario, port, number, folder = sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4]
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=number)
    assert jax.process_count() == 2
    print(json.dumps({"agree": agree, "fail": fail}[scenario](number, folder)))
    jax.distributed.shutdown()
