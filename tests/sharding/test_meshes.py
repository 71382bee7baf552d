"""Every operation on meshes with explicit axes, and through `shard_map` with replicated arguments."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

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
