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


RECIPE = """
import json
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, PartitionSpec as P
from ejkernel.modules import attention
from ejkernel.testing.compare import relative_rms
from ejkernel.types.mask import MaskInfo
from examples.several_devices import causal_attention

rng = np.random.default_rng(0)
q, k, v = (jnp.asarray(rng.normal(size=(2, 24, heads, 8)), jnp.float32) for heads in (4, 2, 2))
documents = jnp.asarray([[0] * 4 + [1] * 11 + [2] * 6 + [-1] * 3, [5] * 24])  # 6 tokens in a shard
mesh = jax.make_mesh((4,), ("time",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
tokens, found = P(None, "time"), {}
for name, ids in (("one document", None), ("documents", documents)):
    info = None if ids is None else MaskInfo.from_segments(ids)
    whole = lambda q, k, v: attention(q, k, v, mask_info=info, causal=True, dtype=None, return_weights=False)
    local = lambda q, k, v, ids: causal_attention(q, k, v, "time", ids)
    for check in (True, False):
        mapped = jax.shard_map(local, mesh=mesh, in_specs=tokens, out_specs=tokens, check_vma=check)
        split = lambda q, k, v: mapped(q, k, v, ids)
        both = lambda call: lambda *x: (lambda out, pull: (out, pull(jnp.sin(out))))(*jax.vjp(call, *x))
        got, want = (jax.jit(both(call))(q, k, v) for call in (split, whole))
        errors = jax.tree.map(lambda x, y: float(relative_rms(np.asarray(x), np.asarray(y))), got, want)
        found[f"{name}, {check}"] = jax.tree.leaves(errors)
print(json.dumps(found))
"""


@pytest.mark.long
def test_softmax_attention_sees_across_shards():
    """Outputs and gradients of causal attention, packed or not, where documents cross the shards' edges."""
    found = json.loads(outside("-c", RECIPE, environment={"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}))
    assert all(error < 1e-5 for errors in found.values() for error in errors), found


@pytest.mark.long
def test_step_over_a_mesh():
    found = json.loads(outside("-c", PROGRAM, environment={"XLA_FLAGS": "--xla_force_host_platform_device_count=8"}))
    assert all(error < 1e-4 for error in found["errors"]), found["errors"]
    one, eight = found["memory"]
    assert eight < 1.1 * one
