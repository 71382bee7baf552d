"""Every kernel compiles for Ampere and Hopper, within their shared memory, and the calls lower: no GPU needed.

Compiled in a process of its own: in this one the kernels are interpreted (test_interpreted.py).
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")

ROOT = Path(__file__).parents[2]
SHARED = {80: 163 * 1024, 90: 227 * 1024}  # bytes that one program may take
CALLS = {80: ["none", "g", "gk"], 90: ["none", "g", "gk", "gk wide", "gk gv"]}  # the rest: python -m tests.triton.resources 90
# Bytes of stack frame. On Hopper the worst of the tuned calls is the scalar backward (240), whose other tiles all took longer
# (benchmarks/NOTES_gpu.md). Ampere's are compiled, not tuned: nobody has measured there.
SPILLS = {80: 500, 90: 300}


def outside(*arguments: str) -> str:
    """What a Python process without the interpreter prints."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {
        "PYTHONPATH": str(ROOT),
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.parametrize("capability", [80, 90])
def test_kernels_compile_and_fit(capability):
    entries = [
        json.loads(line) for line in outside("-m", "tests.triton.resources", str(capability), *CALLS[capability]).splitlines()
    ]
    print("\n".join(map(str, entries)))
    assert {e["call"] for e in entries} >= {"none", "g", "gk", "decode"}
    assert all(e["shared"] <= SHARED[capability] for e in entries), [e for e in entries if e["shared"] > SHARED[capability]]
    tuned = [e for e in entries if e["call"] in ("none", "g", "gk")]
    assert all(e["spills"] <= SPILLS[capability] for e in tuned), [e for e in tuned if e["spills"] > SPILLS[capability]]


LOWER = """
import jax, jax.numpy as jnp
from ejkernel.callib import compile_for
from ejkernel.kernels._triton.recurrent import recurrent
from tests.triton.resources import arguments
f = jax.jit(lambda a: jax.grad(lambda a: recurrent(**a)[0].astype(jnp.float32).sum())(a))
with compile_for(90):
    text = f.trace(arguments(("gk",), 64, 64, "bfloat16")).lower(lowering_platforms=("cuda",)).as_text()
print(text.count("triton_kernel_call_ffi"))
"""


def test_lowers_to_triton_calls():
    try:
        from jaxlib import gpu_triton
    except ImportError:
        pytest.skip("needs JAX's CUDA plugin")
    if not hasattr(gpu_triton, "TritonKernel"):
        pytest.skip("needs JAX's CUDA plugin")
    assert int(outside("-c", LOWER)) >= 5
