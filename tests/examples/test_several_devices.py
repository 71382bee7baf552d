"""The step over a mesh is the step on whole sequences; eight devices hold eight times the length of one."""

from __future__ import annotations

import json

import pytest

from tests.triton.processes import outside

PROGRAM = """
import functools, json
import jax, numpy as np
from ejkernel.testing.compare import relative_rms
from examples.several_devices import init, losses, make_mesh, memory, split_loss, text

layers = ("linear", "softmax")
params = init(jax.random.key(0), 16, 32, layers)
tokens, targets = text(jax.random.key(1), 2, 64, 16)
whole = lambda params: losses(params, tokens, targets, layers, None) / tokens.size
split = functools.partial(split_loss, tokens=tokens, targets=targets, mesh=make_mesh(2, 4), layers=layers)
want, got = (jax.jit(jax.value_and_grad(loss))(params) for loss in (whole, split))
errors = jax.tree.map(lambda x, y: float(relative_rms(np.asarray(x), np.asarray(y))), got, want)
print(json.dumps({"errors": jax.tree.leaves(errors), "memory": [memory(512, 1), memory(8 * 512, 8)]}))
"""


@pytest.mark.long
def test_step_over_a_mesh():
    found = json.loads(outside("-c", PROGRAM, environment={"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}))
    assert all(error < 1e-4 for error in found["errors"]), found["errors"]
    one, eight = found["memory"]
    assert eight < 1.1 * one
