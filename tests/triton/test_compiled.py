"""Every kernel compiles for Ampere and Hopper, within their shared memory, and spills only for a reason: no GPU needed.

Compiled in a process of its own: in this one the kernels are interpreted (test_interpreted.py).
"""

import json

import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")

from ejkernel.testing.triton_calls import EVERY
from tests.triton.processes import outside
from tests.triton.spills import outdated, unexplained

# All of ejkernel.testing.triton_calls, in groups that take about as long (25 s where nothing is cached).
GROUPS = [
    ["none", "gk", "g broad", "g float16", "decode"],
    ["g", "g_gamma", "gk wide", "g wide"],
    ["gk gv", "gk gv forward", "all float32"],
    ["delta head", "delta none wide", "delta head float32"],
    ["delta channel", "delta channel wide", "delta channel float32"],
    ["attention", "attention 64", "attention 256", "attention everything", "attention float32", "attention decode"],
]


@pytest.mark.parametrize("calls", GROUPS, ids=" and ".join)
@pytest.mark.parametrize("capability", [80, 90])
@pytest.mark.slow
def test_kernels_compile_and_fit(capability, calls):
    text = outside("-m", "benchmarks.triton_resources", "--json", "--capability", str(capability), "--calls", *calls)
    entries = [json.loads(line) for line in text.splitlines()]
    assert {e["call"] for e in entries} == set(calls)
    assert not [e for e in entries if e["lowered"]]  # the shared memory has room for the default's loads in flight
    missing = "\n".join(unexplained(entries))
    assert not missing, f"default tiles that spill need a reason and its measurement in tests/triton/spills.py:\n{missing}"
    assert outdated(entries) == []


def test_groups_hold_every_call():
    assert sorted(call for group in GROUPS for call in group) == sorted(EVERY)
