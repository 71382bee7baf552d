"""One process of a program of two, each with two simulated devices: time is split over all four.

What it finds it prints as JSON. Run by `test_two_processes`.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from ejkernel.modules.base import default_executor
from ejkernel.ops import PersistentCache, Tuner, report
from ejkernel.ops.config.policy import VARIABLE
from ejkernel.testing.compare import relative_rms
from examples.several_devices import TOKENS, init, losses, make_mesh, split_loss, text

LAYERS = ("linear",)


def main(number: int) -> dict[str, Any]:
    """Loss and gradient of the program against those of a process by itself, and how the linear layer came to run.

    Then process 1 ends; `error` is what process 0 is told by its next step, and after how many seconds.
    """
    params = init(jax.random.key(0), 16, 32, LAYERS)
    tokens, targets = (np.asarray(x) for x in text(jax.random.key(1), 2, 128, 16))
    whole = lambda params: losses(params, tokens, targets, LAYERS, None) / tokens.size
    want = jax.jit(jax.value_and_grad(whole))(params)
    os.environ[VARIABLE] = "autotune"
    default_executor().chooser.tuner = Tuner(1, 1)
    step = prepared(params, tokens, targets)
    loss, grads = step()
    pairs = zip(jax.tree.leaves(grads), jax.tree.leaves(want[1]), strict=True)
    errors = [float(relative_rms(np.asarray(x), np.asarray(y))) for x, y in pairs]
    split = [each for each in report() if each.op_id == "gla"][-1]
    found = {"query": split.arguments["query"], "level": split.level, "cfg": str(split.config), "loss": float(loss)}
    found |= {"errors": errors, "stored": len(list(PersistentCache("gla").items()))}
    return found | (deserted(step) if number == 0 else {})


def prepared(params: Any, tokens: np.ndarray, targets: np.ndarray) -> Callable[[], Any]:
    """The step over the devices of all processes: loss and gradients."""
    mesh = make_mesh(1, 4)

    def everywhere(x: Any, spec: PartitionSpec) -> jax.Array:
        return jax.make_array_from_callback(x.shape, NamedSharding(mesh, spec), lambda index: np.asarray(x)[index])

    run = jax.jit(jax.value_and_grad(functools.partial(split_loss, mesh=mesh, layers=LAYERS)))
    placed = jax.tree.map(lambda x: everywhere(x, PartitionSpec()), params)
    return functools.partial(run, placed, *(everywhere(x, TOKENS) for x in (tokens, targets)))


def deserted(step: Callable[[], Any]) -> dict[str, Any]:
    time.sleep(2)  # until the other process has ended
    begun = time.monotonic()
    try:
        float(step()[0])
        told = "nothing"
    except Exception as error:
        told = f"{type(error).__name__}: {error}"
    return {"told": told, "seconds": time.monotonic() - begun}


if __name__ == "__main__":
    port, who = sys.argv[1], int(sys.argv[2])
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=who)
    print(json.dumps(main(who)), flush=True)
    os._exit(0)  # without waiting for each other
