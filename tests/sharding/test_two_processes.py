"""One program of two processes: a training step whose time is split over both, its tuning, and the end of one of them."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys

import pytest


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What each process printed, and the folder of their caches."""
    folder = tmp_path_factory.mktemp("caches")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    variables = {
        **os.environ, "PYTHONPATH": os.pathsep.join([os.getcwd(), *sys.path]), "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2 --xla_backend_optimization_level=0",
        "EJKERNEL_AUTOTUNE_POLICY": "heuristics",
    }  # fmt: skip
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.sharding.two_processes", port, str(number)],
            env={**variables, "EJKERNEL_CACHE_DIR": str(folder / str(number))},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(2)
    ]
    try:
        ended = [process.communicate(timeout=300) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, errors) in zip(processes, ended, strict=True):
        assert process.returncode == 0, errors[-3000:]
    return *(json.loads(output.strip().splitlines()[-1]) for output, _ in ended), folder


@pytest.mark.long
def test_a_training_step_and_its_tuning(found):
    first, second, _ = found
    assert all(error < 1e-5 for error in first["errors"] + second["errors"]), (first, second)
    assert first["loss"] == second["loss"]
    assert (first["level"], second["level"]) == ("autotune", "autotune")
    assert first["cfg"] == second["cfg"]
    assert first["query"] == "float32[2,~32,4,8]", "what is tuned is a shard's own call"
    assert (first["stored"], second["stored"]) == (1, 0), "process 0 writes, and only process 0"


@pytest.mark.long
def test_a_process_that_is_gone_is_an_error_of_the_others(found):
    first, _, folder = found
    assert "closed by peer" in first["told"] or "reset by peer" in first["told"], first["told"]
    assert first["seconds"] < 60
    assert not [*folder.rglob("*.tmp*")], "nothing half written is left in a cache"
