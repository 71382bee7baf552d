"""Every kernel compiles for Ampere and Hopper, within their shared memory, and spills only for a reason: no GPU needed.

Compiled in a process of its own: in this one the kernels are interpreted (test_interpreted.py).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")

from benchmarks.triton_resources import CALLS
from tests.triton.spills import outdated, unexplained

ROOT = Path(__file__).parents[2]
SHARED = {80: 163 * 1024, 90: 227 * 1024}  # bytes that one program may take
# All of benchmarks.triton_resources.CALLS and "decode", in groups that take about as long (25 s where nothing is cached).
GROUPS = [["none", "gk", "g float16", "decode"], ["g", "g_gamma", "gk wide", "g wide"], ["gk gv", "all float32"]]


def outside(*arguments: str) -> str:
    """What a Python process without the interpreter prints."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("calls", GROUPS, ids=" and ".join)
@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_and_fit(capability, calls):
    text = outside("-m", "benchmarks.triton_resources", "--json", "--capability", str(capability), "--calls", *calls)
    entries = [json.loads(line) for line in text.splitlines()]
    assert {e["call"] for e in entries} == set(calls)
    assert [e for e in entries if e["shared"] > SHARED[capability]] == []
    missing = "\n".join(unexplained(entries))
    assert not missing, f"default tiles that spill need a reason and its measurement in tests/triton/spills.py:\n{missing}"
    assert outdated(entries) == []


def test_groups_hold_every_call():
    assert sorted(call for group in GROUPS for call in group) == sorted([*CALLS, "decode"])
