"""`head_gate_scan_by_warpgroups`: which calls take it, and what it is compiled to. Its values: test_gpu.py, since Triton's
interpreter knows no Gluon."""

import json

import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")

from ejkernel.kernels._linear import LinearConfig
from ejkernel.kernels._triton.linear._launches import arrays_of, launches
from ejkernel.kernels._triton.linear._plan import Plan
from ejkernel.kernels._triton.linear.routes import route_of
from tests.triton.processes import outside
from tests.triton.test_routes import problem

CHANNELS = [(64, 64), (64, 128), (128, 64), (128, 128)]


def scans(gates, K, V, cfg=None, **of_problem) -> set[str]:
    """The scans with outputs that a call launches, forward and backward."""
    call = problem(gates, K, V, 2000, **of_problem)
    found = launches(route_of(Plan.of(call, cfg or LinearConfig())), arrays_of(call), call.cu_seqlens)
    return {launch.name for launch in (*found.forward, *found.backward) if launch.name.startswith("head_gate_scan")}


@pytest.mark.parametrize("gates", [(), ("g",), ("g_gamma",), ("g", "g_gamma")], ids=lambda gates: "+".join(gates) or "none")
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_every_scan_of_whole_tiles_on_hopper(gates, packed):
    for K, V in CHANNELS:
        assert scans(gates, K, V, packed=packed) == {"head_gate_scan_by_warpgroups"}


def test_all_others_by_the_portable_kernel():
    portable = {"head_gate_scan"}
    assert scans(("g",), 100, 64) == portable
    assert scans(("g",), 128, 36) == portable
    assert scans(("g",), 64, 64, dtype="float16") == portable
    for capability in (80, 89, 100, 120):
        assert scans(("g",), 128, 128, capability=capability) == portable
    for cfg in (LinearConfig(block_q=32), LinearConfig(block_d=32), LinearConfig(num_warps=8), LinearConfig(num_stages=2)):
        assert scans(("g",), 128, 128, cfg) == portable


@pytest.mark.long
def test_compiled_for_hopper():
    """Within its shared memory, with all warpgroups, and products that are waited for only where the kernel says so."""
    found = json.loads(outside("-m", "tests.triton.warpgroups"))
    assert all(found.values())
    for call, launches_of_call in found.items():
        for launch in launches_of_call:
            assert launch["warps"] == 4 * (2 + launch["values"] // 64), call
            assert not launch["serialized"], call
