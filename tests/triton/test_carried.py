"""A cache of Triton's that is packed on one machine and unpacked on another is one that its kernels are found in."""

import shutil

import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")

from tests.triton.processes import outside

COMPILES = """
import sys
from ejkernel.callib._compiled import Options, compile_kernel
from tests.callib.test_triton_call import product
if "found" in sys.argv:
    import triton.compiler.compiler as compiler
    compiler.ASTSource.make_ir = lambda *given, **named: sys.exit("it was compiled again")
signature = tuple((name, "*fp32") for name in ("a", "b", "out"))
print(compile_kernel(product, signature, (("B", 16),), Options(4, 1, None), 90).asm["ptx"])
"""


def test_kernels_are_found_in_a_cache_that_came_from_elsewhere(tmp_path):
    here, file, there = tmp_path / "here", tmp_path / "packed" / "cache.tar.xz", tmp_path / "there"
    ptx = outside("-c", COMPILES, environment={"TRITON_CACHE_DIR": str(here)})
    (here / "begun").mkdir()
    (here / "begun" / "half.ptx").touch()
    outside("-m", "tests.carried", "pack", str(here), str(file))
    shutil.rmtree(here)
    outside("-m", "tests.carried", "unpack", str(file), str(there))
    assert outside("-c", COMPILES, "found", environment={"TRITON_CACHE_DIR": str(there)}) == ptx
    assert not list(there.glob("begun"))
    (kernel,) = there.glob("*/product.ptx")
    kernel.write_text("its own")
    outside("-m", "tests.carried", "unpack", str(file), str(there))
    assert kernel.read_text() == "its own"
