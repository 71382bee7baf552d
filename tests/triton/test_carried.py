"""A cache of Triton's that is packed on one machine and unpacked on another is one that its kernels are found in."""

import shutil
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")

from tests.triton.processes import ROOT, outside

COMPILES = """
import os, sys
import ejkernel
assert ejkernel.__file__.startswith(os.environ["CHECKOUT"])
from ejkernel.callib._compiled import Options, compile_kernel
from tests.callib.test_triton_call import product
if "found" in sys.argv:
    import triton.compiler.compiler as compiler
    compiler.ASTSource.make_ir = lambda *given, **named: sys.exit("it was compiled again")
signature = tuple((name, "*fp32") for name in ("a", "b", "out"))
print(compile_kernel(product, signature, (("B", 16),), Options(4, 1, None), 90).asm["ptx"])
"""


def compiles(cache: Path, *found: str, checkout: Path = ROOT) -> str:
    """What a process with the sources of a checkout finds in a cache, or compiles into it."""
    environment = {"TRITON_CACHE_DIR": str(cache), "PYTHONPATH": str(checkout), "CHECKOUT": str(checkout)}
    return outside("-P", "-c", COMPILES, *found, environment=environment)


def test_kernels_are_found_in_a_cache_that_came_from_elsewhere(tmp_path):
    """By another checkout, too: the machine with the GPU has other paths."""
    here, file, there = tmp_path / "here", tmp_path / "packed" / "cache.tar.xz", tmp_path / "there"
    other = tmp_path / "another" / "checkout"
    for folder in ("ejkernel", "tests"):
        shutil.copytree(ROOT / folder, other / folder, ignore=shutil.ignore_patterns("__pycache__"))
    ptx = compiles(here)
    (here / "begun").mkdir()
    (here / "begun" / "half.ptx").touch()
    outside("-m", "tests.carried", "pack", str(here), str(file))
    shutil.rmtree(here)
    outside("-m", "tests.carried", "unpack", str(file), str(there))
    assert compiles(there, "found", checkout=other) == ptx
    assert not list(there.glob("begun"))
    (kernel,) = there.glob("*/product.ptx")
    kernel.write_text("its own")
    outside("-m", "tests.carried", "unpack", str(file), str(there))
    assert kernel.read_text() == "its own"
