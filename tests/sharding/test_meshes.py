"""Every operation on meshes with explicit axes, and through `shard_map` with replicated arguments."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ejkernel.modules import lightning_attention
from tests.documentation.pages import ROOT, blocks
from tests.sharding.calls import checks


@pytest.fixture(scope="module")
def found(once):
    return once("meshes", _run)


def _run():
    environment = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.sharding.calls"],
        env={**os.environ, **environment, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", list(checks()))
@pytest.mark.long
def test_on_eight_devices(found, name):
    assert not found[name], found[name]


def test_the_decays_of_the_page_are_those_of_all_heads():
    """Shards are elements of a vmap here, which have an axis with a name too."""
    code = next(block.code for block in blocks(ROOT / "docs" / "several_devices.md") if "def split_lightning" in block.code)
    names: dict[str, Any] = {}
    exec(code, names)
    query = jax.random.normal(jax.random.key(0), (1, 6, 4, 3))
    key, value = query[:, :, :2] + 1, query[:, ::-1, :2]
    layer: dict[str, Any] = {"layer_idx": 1, "num_layers": 3, "return_state": True}
    own = jax.vmap(lambda *arrays: names["split_lightning"](*arrays, "shards", **layer), 2, 2, axis_name="shards")
    output, state = own(*(x.reshape(1, 6, 2, -1, 3) for x in (query, key, value)))
    want, final = lightning_attention(query, key, value, **layer)
    np.testing.assert_allclose(output.reshape(want.shape), want, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(jnp.moveaxis(state, 2, 1).reshape(final.shape), final, rtol=1e-5, atol=1e-6)
