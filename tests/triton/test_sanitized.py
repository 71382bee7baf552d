"""The cases that are run under compute-sanitizer on a GPU leave no kernel out."""

import pickle
import sys

import jax
import jax.numpy as jnp
import pytest

pytest.importorskip("triton", reason="the triton platform needs Triton")

from ejkernel.callib import compile_for
from tests.triton import sanitized
from tests.triton.sanitized import CASES, kernels, name_of, value_and_gradient
from tests.triton.watched import read


def test_every_kernel_is_launched(monkeypatch):
    seen: set[str] = set()

    def note(*args, kernel, out_shape, **options):
        seen.add(name_of(kernel))
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), out_shape)

    everything = kernels()
    for name, module in list(sys.modules.items()):
        if name.startswith("ejkernel.kernels._triton.") and hasattr(module, "triton_call"):
            monkeypatch.setattr(module, "triton_call", note)
    jax.clear_caches()
    for case in CASES:
        lengths = None if case.cu_seqlens is None else jax.ShapeDtypeStruct((len(case.cu_seqlens),), jnp.int32)
        with compile_for(90):
            jax.eval_shape(value_and_gradient(case), jax.eval_shape(case.arrays), lengths, case.weights())
    jax.clear_caches()
    assert len(everything) >= 9
    assert seen == everything


def test_programs_are_compiled_once_for_the_same_code(monkeypatch, tmp_path):
    file = tmp_path / "build" / "programs.pickle"
    compiled: list[int] = []

    def programs(target):
        compiled.append(target)
        return [("case", b"", [])]

    monkeypatch.setattr(sys, "argv", ["sanitized", str(file), "90"])
    monkeypatch.setattr(sanitized, "_programs", programs)
    for _ in range(2):
        sanitized.main()
    assert compiled == [90]
    found = read(str(file))
    assert found["programs"] == [("case", b"", [])]
    file.write_bytes(pickle.dumps({**found, "about": {**found["about"], "code": "other"}}))
    sanitized.main()
    assert compiled == [90, 90]
